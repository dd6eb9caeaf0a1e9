"""Says which hosts and addresses a tool may reach. Looks nothing up and connects to nothing.

Whoever writes the URL may be a model that read a hostile page, so every address counts as what it is and not
as it is spelled, and whatever is not plainly a public address is refused unless `allowedHosts` names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from yarl import URL

from toolspace.errors import ConfigError, ToolPermissionError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Host = str | Address
"""A name in lower-case ASCII, or the address that the text spelled."""

# Written out, not asked of `ipaddress`: what its `is_private` and `is_global` mean differs between Python
# releases. The first match counts, so the narrow ones stand first.
_SPECIAL: tuple[tuple[str, Network], ...] = tuple(
    (kind, ip_network(text))
    for kind, texts in (
        # Where clouds serve credentials; 168.63.129.16 is in public space, and reachable from inside only.
        ("metadata", "169.254.169.254/32 169.254.170.2/32 100.100.100.200/32 168.63.129.16/32"),
        ("metadata", "192.0.0.192/32 fd00:ec2::254/128 fd20:ce::254/128"),
        ("unspecified", "0.0.0.0/8 ::/128"),
        ("loopback", "127.0.0.0/8 ::1/128"),
        ("link-local", "169.254.0.0/16 fe80::/10"),
        ("private", "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10 64:ff9b:1::/48"),
        ("shared (carrier NAT)", "100.64.0.0/10"),
        ("multicast", "224.0.0.0/4 ff00::/8"),
        ("reserved", "192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24"),
        ("reserved", "240.0.0.0/4 2001::/23 2001:db8::/32 3fff::/20"),
    )
    for text in texts.split()
)
_GLOBAL_IPV6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")

_METADATA_NAMES = frozenset(
    (
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.tencentyun.com",
    )
)

_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")


def canonical_host(text: str) -> Host:
    """What a host in a URL or a setting stands for. Raises `ValueError` where it is none.

    Every spelling of an address that some resolver understands (`127.1`, `0x7f.1`, `2130706433`,
    `::ffff:127.0.0.1`, digits of other scripts) gives that address: nobody below sees a spelling again.
    """
    if ":" in text:
        if "%" in text:
            raise ValueError(f"{text!r} names a network interface; leave the part from % on away")
        return plain_address(IPv6Address(text))
    if not text.isascii():
        text = URL.build(scheme="http", host=text).raw_host or ""
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        return _ipv4(labels, text)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is not a host name")
    return name


def plain_address(address: Address) -> Address:
    """The IPv4 address inside `::ffff:a.b.c.d`, where the system would connect to; else the address."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.scope_id is not None:
            return IPv6Address(int(address))
    return address


def special_kind(address: Address) -> str | None:
    """Why an address is not a public one: `private`, `loopback`, `metadata`, …; None for a public one."""
    address = plain_address(address)
    for kind, network in _SPECIAL:
        if address in network:
            return kind
    if isinstance(address, IPv6Address):
        if address.sixtofour is not None:
            return special_kind(address.sixtofour)
        if address in _NAT64:
            return special_kind(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_IPV6:
            return "reserved"
    return None


class AllowedHosts:
    """The entries of `allowedHosts`: `host`, `host:port`, `*.domain`, an address, a network, `*` for all."""

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

    def names(self, host: Host, port: int) -> bool:
        """Whether an entry names this host, so that it may be reached wherever it is."""
        if not isinstance(host, str):
            return False
        if (host, None) in self._names or (host, port) in self._names:
            return True
        return any(host.endswith(suffix) and only in (None, port) for suffix, only in self._suffixes)

    def covers(self, address: Address, port: int) -> bool:
        """Whether an entry names this very address, or a network that it is in."""
        return any(address in network and only in (None, port) for network, only in self._networks)

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
            named = canonical_host(host)
            if isinstance(named, str):
                self._names.add((named, port))
            else:
                self._networks.append((ip_network(named), port))


class Guard:
    """Refuses hosts and addresses that are neither public nor allowed."""

    __slots__ = ("_allowed",)

    def __init__(self, allowed_hosts: Sequence[str] | None = None) -> None:
        self._allowed = AllowedHosts(allowed_hosts or ())

    def check_name(self, host: Host, port: int) -> None:
        """Refuses a name that is known to lead to credentials, before anyone looks it up."""
        if host in _METADATA_NAMES and not self._allowed.names(host, port):
            raise ToolPermissionError(f"{host} is a metadata service; add the host to allowedHosts to allow it")

    def admit(self, host: Host, port: int, addresses: Sequence[Address]) -> list[Address]:
        """Those of a host's addresses that may be connected to; raises where there is none."""
        if self._allowed.names(host, port):
            return list(addresses)
        admitted = [
            address for address in addresses if special_kind(address) is None or self._allowed.covers(address, port)
        ]
        if not admitted and addresses:
            raise ToolPermissionError(_refusal(host, addresses[0]))
        return admitted


def parse_address(text: str) -> Address:
    """An address as a resolver gives it. Raises `ValueError` where it is none."""
    return plain_address(ip_address(text))


def _refusal(host: Host, address: Address) -> str:
    kind = special_kind(address)
    if isinstance(host, str):
        return f"{host} resolves to the {kind} address {address}; add the host to allowedHosts to allow it"
    return f"{address} is a {kind} address; add it to allowedHosts to allow it"


def _ipv4(labels: list[str], text: str) -> IPv4Address:
    """An address in the forms of `inet_aton`: one to four numbers, the last one filling what is left."""
    try:
        *head, tail = [_number(label) for label in labels]
        if len(head) > 3 or any(number > 255 for number in head) or tail >= 256 ** (4 - len(head)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is not an IPv4 address, and a host name does not end in a number") from None
    for place, number in enumerate(head):
        tail += number << (8 * (3 - place))
    return IPv4Address(tail)


def _number(label: str) -> int:
    if not _NUMERIC.fullmatch(label) or len(label) > 16:
        raise ValueError
    if label.startswith("0x"):
        return int(label[2:] or "0", 16)
    return int(label, 8 if label.startswith("0") else 10)


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
