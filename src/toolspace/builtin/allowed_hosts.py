"""Decides which hosts and addresses the network tools may reach. Resolves no names and opens no connections.

The URL may come from a model that read a hostile page. So addresses are compared by value, not by spelling, and every
address that is not public is refused unless `allowedHosts` names it. `http_client` uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network

from toolspace.core.addresses import Address, Host, Network, canonical_host, special_kind
from toolspace.errors import ConfigError, ToolPermissionError

_METADATA_HOSTS = frozenset(
    (
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.tencentyun.com",
    )
)


class AllowedHosts:
    """The entries of `allowedHosts`: `host`, `host:port`, `*.domain`, an address, a network, or `*` for all."""

    __slots__ = ("_names", "_networks", "_suffixes")

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._names: set[tuple[str, int | None]] = set()
        self._suffixes: list[tuple[str, int | None]] = []
        self._networks: list[tuple[Network, int | None]] = []
        for entry in entries:
            try:
                self._add(entry.strip())
            except ValueError as error:
                raise ConfigError(
                    f"allowedHosts: {entry!r} is not a host, host:port, *.domain, address or network: {error}"
                ) from None

    def allows_name(self, host: Host, port: int) -> bool:
        """Whether an entry names this host. Then it may be reached at any address."""
        if not isinstance(host, str):
            return False
        if (host, None) in self._names or (host, port) in self._names:
            return True
        return any(host.endswith(suffix) and entry_port in (None, port) for suffix, entry_port in self._suffixes)

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether an entry names this address, or a network that contains it."""
        return any(address in network and entry_port in (None, port) for network, entry_port in self._networks)

    def _add(self, entry: str) -> None:
        if "//" in entry:
            raise ValueError("write the host, not a URL")
        host, port = _split_port(entry)
        if host == "*":
            self._suffixes.append(("", port))
            self._networks += [(IPv4Network("0.0.0.0/0"), port), (IPv6Network("::/0"), port)]
        elif "/" in host:
            self._networks.append((ip_network(host, strict=False), port))
        elif host.startswith("*."):
            domain = canonical_host(host[2:])
            if not isinstance(domain, str):
                raise ValueError("for several addresses write a network such as 10.0.0.0/8")
            self._suffixes.append((f".{domain}", port))
        else:
            name_or_address = canonical_host(host)
            if isinstance(name_or_address, str):
                self._names.add((name_or_address, port))
            else:
                self._networks.append((ip_network(name_or_address), port))


class HostGuard:
    """Refuses hosts and addresses that are neither public nor in `allowedHosts`."""

    __slots__ = ("_allowed_hosts",)

    def __init__(self, allowed_hosts: Sequence[str] | None = None) -> None:
        self._allowed_hosts = AllowedHosts(allowed_hosts or ())

    def check_name(self, host: Host, port: int) -> None:
        """Raises for the host name of a metadata service, before it is resolved."""
        if host in _METADATA_HOSTS and not self._allowed_hosts.allows_name(host, port):
            raise ToolPermissionError(f"{host} is a metadata service; add the host to allowedHosts to allow it")

    def filter_addresses(self, host: Host, port: int, addresses: Sequence[Address]) -> list[Address]:
        """The addresses of a host that may be reached. Raises `ToolPermissionError` if none of them may."""
        if self._allowed_hosts.allows_name(host, port):
            return list(addresses)
        permitted_addresses = [
            address
            for address in addresses
            if special_kind(address) is None or self._allowed_hosts.allows_address(address, port)
        ]
        if not permitted_addresses and addresses:
            raise ToolPermissionError(_explain_refusal(host, addresses[0]))
        return permitted_addresses


def _explain_refusal(host: Host, address: Address) -> str:
    kind = special_kind(address)
    if isinstance(host, str):
        return f"{host} resolves to the {kind} address {address}; add the host to allowedHosts to allow it"
    return f"{address} is a {kind} address; add it to allowedHosts to allow it"


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        host, bracket, rest = entry[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("the bracket is not closed")
        port = rest[1:] if rest else None
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        host, port = entry, None
    if port is None:
        return host, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{port!r} is not a port")
    return host, int(port)
