"""Parses hosts and IP addresses, tells which addresses are not public, and compares origins. Resolves no names.

The network guards of built-in tools and REST tools use it. Every spelling of an address gives the same address.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yarl import URL

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Host = str | Address
"""A name in lower-case ASCII, or an address."""

# A table, because `is_private` and `is_global` of `ipaddress` differ between Python releases. The first match counts,
# so narrow networks come first.
_SPECIAL: tuple[tuple[str, Network], ...] = tuple(
    (kind, ip_network(text))
    for kind, texts in (
        # Where clouds serve credentials. 168.63.129.16 is a public address that is reachable from inside only.
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

_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")


def canonical_host(text: str) -> Host:
    """Returns the name or the address of a host in a URL or a setting. Raises `ValueError` if it is neither.

    Every spelling that some resolver understands (`127.1`, `0x7f.1`, `2130706433`, `::ffff:127.0.0.1`, digits of other
    scripts) becomes the address, so that no other code has to handle spellings.
    """
    if ":" in text:
        if "%" in text:
            raise ValueError(f"{text!r} names a network interface; leave the part from % on away")
        return plain_address(IPv6Address(text))
    if not text.isascii():
        from yarl import URL  # Imported here: few hosts need it.

        text = URL.build(scheme="http", host=text).raw_host or ""
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        return _ipv4(labels, text)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is not a host name")
    return name


def plain_address(address: Address) -> Address:
    """Returns the IPv4 address inside `::ffff:a.b.c.d`, which the system connects to; else the address itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.scope_id is not None:
            return IPv6Address(int(address))
    return address


def special_kind(address: Address) -> str | None:
    """Returns why an address is not public: `private`, `loopback`, `metadata`, …; None for a public address."""
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


def parse_address(text: str) -> Address:
    """Returns the address in a text from a resolver. Raises `ValueError` if it is none."""
    return plain_address(ip_address(text))


def is_same_origin(source: URL, target: URL) -> bool:
    """Whether both URLs are the same server, so that a key for one may be sent to the other."""
    if source.origin() == target.origin():
        return True
    # A redirect from http to https of one host reveals the headers to nobody new.
    upgrade = (source.scheme, source.port, target.scheme, target.port) == ("http", 80, "https", 443)
    return upgrade and source.raw_host == target.raw_host


def _ipv4(labels: list[str], text: str) -> IPv4Address:
    """Parses the forms of `inet_aton`: one to four numbers, of which the last fills the remaining bytes."""
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
