"""Addresses, hosts and `allowedHosts`: what counts as public, and what an entry allows."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace.builtin.http_client import AllowedHosts
from toolspace.core.network_addresses import canonical_host, parse_address, special_kind
from toolspace.errors import ConfigError, ToolPermissionError

LOOPBACK = IPv4Address("127.0.0.1")
NAT64 = IPv6Network("64:ff9b::/96")


@pytest.mark.spec("10.3")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "shared (carrier NAT)"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("169.254.1.1", "link-local"),
        ("169.254.169.254", "metadata"),
        ("100.100.100.200", "metadata"),
        ("168.63.129.16", "metadata"),
        ("192.0.0.8", "reserved"),
        ("192.0.2.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("224.0.0.1", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::127.0.0.1", "reserved"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("fec0::1", "private"),
        ("fc00::1", "private"),
        ("fd00:ec2::254", "metadata"),
        ("ff02::1", "multicast"),
        ("2001::1", "reserved"),
        ("2001:db8::1", "reserved"),
        ("4000::1", "reserved"),
        ("::ffff:10.0.0.1", "private"),
        ("::ffff:169.254.169.254", "metadata"),
        ("64:ff9b::7f00:1", "loopback"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("64:ff9b:1::808:808", "private"),
        ("2002:7f00:1::", "loopback"),
        ("2002:c0a8:101::1", "private"),
    ],
)
def test_an_address_that_is_not_public_has_a_kind(text: str, kind: str):
    assert special_kind(ip_address(text)) == kind


@pytest.mark.parametrize(
    "text",
    [
        "8.8.8.8",
        "1.1.1.1",
        "172.32.0.1",
        "100.128.0.1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:808:808::1",
    ],
)
def test_a_public_address_has_no_kind(text: str):
    assert special_kind(ip_address(text)) is None


@settings(deadline=None)
@given(st.ip_addresses())
def test_addresses_that_the_standard_library_calls_special_are_refused(address: IPv4Address | IPv6Address):
    plain = parse_address(str(address))
    if isinstance(plain, IPv6Address) and (plain.sixtofour or plain in NAT64):
        return
    if plain.is_private or plain.is_loopback or plain.is_link_local or plain.is_multicast or plain.is_reserved:
        assert special_kind(address) is not None


@pytest.mark.spec("10.3")
@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "2130706433",
        "0177.0.0.1",
        "0x7f.1",
        "0X7F.0.0.1",
        "0x7f000001",
        "017700000001",
        "::ffff:127.0.0.1",
        "0:0:0:0:0:ffff:7f00:1",
        "１２７.0.0.1",
        "①②⑦.0.0.1",
        "127。0。0。1",
        "127．0．0．1",
        "０x7f.1",
    ],
)
def test_every_spelling_of_an_address_is_recognized(text: str):
    assert canonical_host(text) == LOOPBACK


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a..b",
        "a b",
        "a/b",
        "a%2eb",
        "a,b",
        "[::1]",
        "1.2.3.4.5",
        "256.1.1.1",
        "1.2.3.256",
        "4294967296",
        "08.0.0.1",
        "example.1",
        "fe80::1%eth0",
        "a" * 64,
        ".".join(["a" * 60] * 5),
    ],
)
def test_an_invalid_host_is_rejected(text: str):
    with pytest.raises(ValueError):
        canonical_host(text)


@settings(deadline=None)
@given(st.text(alphabet="0123456789abcdefx.", min_size=1, max_size=24))
def test_a_host_that_the_system_reads_as_an_address_is_not_a_name(text: str):
    try:
        expected = IPv4Address(socket.inet_aton(text))
    except OSError:
        expected = None
    try:
        host = canonical_host(text)
    except ValueError:
        return
    if isinstance(host, str):
        assert expected is None
        with pytest.raises(OSError, match="illegal"):
            socket.inet_aton(host)
    elif expected is not None:
        assert host == expected


@settings(deadline=None)
@given(st.ip_addresses(v=4), st.sampled_from("dohs"))
def test_an_address_in_numbers_of_any_base_is_recognized(address: IPv4Address, form: str):
    number = int(address)
    spelling = {
        "d": str(number),
        "o": f"0{number:o}",
        "h": f"0x{number:x}",
        "s": f"{number >> 24}.{number & 0xFFFFFF}",
    }[form]
    assert canonical_host(spelling) == address


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_canonical_host_or_a_value_error(text: str):
    try:
        host = canonical_host(text)
    except ValueError:
        return
    assert canonical_host(str(host)) == host


@pytest.mark.spec("10.3")
@pytest.mark.parametrize(
    ("entry", "host", "address", "port"),
    [
        ("localhost", "localhost", "127.0.0.1", 80),
        ("LocalHost.", "localhost", "::1", 9999),
        ("localhost:8080", "localhost", "127.0.0.1", 8080),
        ("internal.example", "internal.example", "10.1.2.3", 443),
        ("*.corp.example", "wiki.corp.example", "10.1.2.3", 443),
        ("*.corp.example", "a.b.corp.example", "10.1.2.3", 443),
        ("*.corp.example:8443", "wiki.corp.example", "10.1.2.3", 8443),
        ("bücher.example", "xn--bcher-kva.example", "10.1.2.3", 443),
        ("10.0.0.0/8", "anything.example", "10.200.0.1", 80),
        ("10.0.0.5", "anything.example", "10.0.0.5", 80),
        ("10.0.0.5:8080", "anything.example", "10.0.0.5", 8080),
        ("::1", "anything.example", "::1", 80),
        ("[::1]:8080", "anything.example", "::1", 8080),
        ("fd00::/8", "anything.example", "fd12::1", 80),
        ("169.254.169.254", "anything.example", "169.254.169.254", 80),
        ("*", "anything.example", "127.0.0.1", 80),
        ("*:8080", "anything.example", "::1", 8080),
    ],
)
def test_an_entry_allows_its_host(entry: str, host: str, address: str, port: int):
    assert AllowedHosts([entry]).filter_addresses(host, port, [ip_address(address)]) == [ip_address(address)]


@pytest.mark.spec("10.3")
@pytest.mark.parametrize(
    ("entry", "host", "address", "port"),
    [
        ("localhost:8080", "localhost", "127.0.0.1", 8081),
        ("localhost", "notlocalhost", "127.0.0.1", 80),
        ("localhost", "localhost.evil.example", "127.0.0.1", 80),
        ("*.corp.example", "corp.example", "10.0.0.1", 80),
        ("*.corp.example", "evilcorp.example", "10.0.0.1", 80),
        ("*.corp.example", "corp.example.evil.example", "10.0.0.1", 80),
        ("10.0.0.0/8", "anything.example", "172.16.0.1", 80),
        ("10.0.0.5:8080", "anything.example", "10.0.0.5", 80),
        ("10.0.0.0/8", "anything.example", "64:ff9b::a00:1", 80),
    ],
)
def test_an_entry_allows_nothing_else(entry: str, host: str, address: str, port: int):
    with pytest.raises(ToolPermissionError):
        AllowedHosts([entry]).filter_addresses(host, port, [ip_address(address)])


@pytest.mark.parametrize(
    "entry",
    [
        "http://localhost",
        "",
        "a b",
        "host:",
        "host:0",
        "host:99999",
        "*.10.0.0.1",
        "a*.example",
        "10.0.0.0/99",
        "[::1",
    ],
)
def test_an_invalid_entry_is_a_configuration_error(entry: str):
    with pytest.raises(ConfigError, match="allowedHosts"):
        AllowedHosts([entry])


@pytest.mark.spec("10.3")
def test_the_refusal_names_host_kind_address_and_setting():
    with pytest.raises(ToolPermissionError) as refusal:
        AllowedHosts().filter_addresses("db.example", 80, [ip_address("10.0.0.1")])
    assert str(refusal.value) == (
        "Permission denied: db.example resolves to the private address 10.0.0.1; "
        "add the host to allowedHosts to allow it"
    )


def test_refused_addresses_are_dropped_and_public_ones_stay():
    public = ip_address("8.8.8.8")
    assert AllowedHosts().filter_addresses("mixed.example", 80, [LOOPBACK, public, ip_address("fd00::1")]) == [public]


@pytest.mark.spec("10.3")
def test_metadata_hosts_are_refused_before_they_are_resolved():
    with pytest.raises(ToolPermissionError, match="metadata"):
        AllowedHosts(["10.0.0.0/8"]).check_name("metadata.google.internal", 80)
    AllowedHosts(["metadata.google.internal"]).check_name("metadata.google.internal", 80)
    AllowedHosts().check_name("metadata.example", 80)
