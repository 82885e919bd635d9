"""Addresses to listen on and to connect to, and the rule on plaintext."""

from __future__ import annotations

import pytest

from afl.config.address import (
    Address,
    check_plaintext,
    is_loopback,
    is_wildcard,
    parse_listen,
    parse_target,
    shown_peer,
)
from afl.errors import AddressError, ConfigError

BOTH = [
    ("127.0.0.1:50051", Address("127.0.0.1", 50051), "127.0.0.1:50051"),
    ("localhost:1", Address("localhost", 1), "localhost:1"),
    ("afl-server.federation.svc.cluster.local:65535", None, None),
    ("my_service:50051", Address("my_service", 50051), "my_service:50051"),
    ("example.org.:50051", Address("example.org.", 50051), "example.org.:50051"),
    ("dns:50051", Address("dns", 50051), "dns:50051"),
    ("[::1]:50051", Address("::1", 50051), "[::1]:50051"),
    ("[2001:db8::5]:443", Address("2001:db8::5", 443), "[2001:db8::5]:443"),
    ("[fe80::1%eth0]:50051", Address("fe80::1%eth0", 50051), "[fe80::1%eth0]:50051"),
    ("[::ffff:127.0.0.1]:50051", Address("::ffff:127.0.0.1", 50051), "[::ffff:127.0.0.1]:50051"),
]


@pytest.mark.parametrize(("text", "address", "written"), BOTH)
def test_for_both_ends(text: str, address: Address | None, written: str | None) -> None:
    assert parse_listen(text) == parse_target(text)
    if address is not None:
        assert parse_listen(text) == address
        assert str(address) == written


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":50051", Address("::", 50051)),
        ("*:50051", Address("::", 50051)),
        ("0.0.0.0:50051", Address("0.0.0.0", 50051)),
        ("[::]:50051", Address("::", 50051)),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
    ],
)
def test_for_listening_only(text: str, address: Address) -> None:
    assert parse_listen(text) == address
    assert parse_listen(str(address)) == address
    with pytest.raises(AddressError):
        parse_target(text)


WILDCARD = (
    " means every address of a machine, which only a listener can use; connect to the server's name or"
    " address, or to localhost:50051 if it runs on this machine"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":50051", "':50051' names no host to connect to; on this machine it is localhost:50051"),
        ("0.0.0.0:50051", f"'0.0.0.0:50051'{WILDCARD}"),
        ("[::]:50051", f"'[::]:50051'{WILDCARD}"),
        ("[0:0::0]:50051", f"'[0:0::0]:50051'{WILDCARD}"),
        ("[::ffff:0.0.0.0]:50051", f"'[::ffff:0.0.0.0]:50051'{WILDCARD}"),
        ("*:50051", f"'*:50051'{WILDCARD}"),
        ("silo:0", "'silo:0' has port 0, which only a listener can use; give the port of the server"),
    ],
)
def test_no_target(text: str, message: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_target(text)
    assert str(caught.value) == message


AMBIGUOUS = (
    "'2001:db8::5:443': an IPv6 address goes in brackets, before its port: [2001:db8::5]:443 or"
    " [2001:db8::5:443]:50051"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' has no port; write host:port, for example localhost:50051"),
        ("silo", "'silo' has no port; write host:port, for example silo:50051"),
        ("50051", "'50051' has no host; write host:port, for example localhost:50051"),
        ("silo:", "'silo:' has the port ''; a port is a whole number from 0 to 65535"),
        ("silo:65536", "'silo:65536' has the port '65536'; a port is a whole number from 0 to 65535"),
        ("silo:-1", "'silo:-1' has the port '-1'; a port is a whole number from 0 to 65535"),
        ("silo:٣", "'silo:٣' has the port '٣'; a port is a whole number from 0 to 65535"),
        ("silo:5 ", "'silo:5 ' has the port '5 '; a port is a whole number from 0 to 65535"),
        ("::1", "'::1': an IPv6 address goes in brackets, before its port: [::1]:50051"),
        ("2001:db8::5:443", AMBIGUOUS),
        ("a:b:c", "'a:b:c' has more than one colon and is no IPv6 address; write host:port"),
        ("[::1]", "'[::1]' has no port; write for example [::1]:50051"),
        ("[::1]50051", "'[::1]50051' has no port; write for example [::1]:50051"),
        ("[::1:50051", "'[::1:50051' has no IPv6 address in its brackets; write for example [::1]:50051"),
        (
            "[127.0.0.1]:5",
            "'[127.0.0.1]:5' has no IPv6 address in its brackets; write for example [::1]:50051",
        ),
        (
            "unix:/run/afl.sock",
            "'unix:/run/afl.sock' is a Unix socket, which is not supported; write host:port",
        ),
        (
            "unix-abstract:afl",
            "'unix-abstract:afl' is a Unix socket, which is not supported; write host:port",
        ),
        ("/run/afl.sock", "'/run/afl.sock' is a Unix socket, which is not supported; write host:port"),
        ("http://silo:5", "'http://silo:5' starts with 'http://'; write host:port alone: silo:5"),
        ("dns:///silo:5", "'dns:///silo:5' starts with 'dns://'; write host:port alone: silo:5"),
        ("ipv6:[::1]:5", "'ipv6:[::1]:5' starts with 'ipv6:'; write host:port alone: [::1]:5"),
        (
            "256.0.0.1:5",
            "'256.0.0.1:5': '256.0.0.1' is not an IPv4 address; it has four numbers from 0 to 255",
        ),
        ("0:5", "'0:5': '0' is not an IPv4 address; it has four numbers from 0 to 255"),
        ("127.1:5", "'127.1:5': '127.1' is not an IPv4 address; it has four numbers from 0 to 255"),
        (
            "sílo:5",
            "'sílo:5': 'sílo' is not a host name; it has letters a-z, digits and dashes between its dots",
        ),
        (
            "a..b:5",
            "'a..b:5': 'a..b' is not a host name; it has letters a-z, digits and dashes between its dots",
        ),
        ("-a:5", "'-a:5': '-a' is not a host name; it has letters a-z, digits and dashes between its dots"),
        (" a:5", "' a:5': ' a' is not a host name; it has letters a-z, digits and dashes between its dots"),
    ],
)
def test_neither(text: str, message: str) -> None:
    for parse in (parse_listen, parse_target):
        with pytest.raises(AddressError) as caught:
            parse(text)
        assert str(caught.value) == message


def test_a_host_name_has_at_most_253_characters() -> None:
    label = "a" * 61
    assert parse_listen(f"{'.'.join([label] * 4)}:5").port == 5
    with pytest.raises(AddressError, match="is not a host name"):
        parse_listen(f"{'.'.join([label] * 5)}:5")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert Address(host, 1).is_loopback


@pytest.mark.parametrize(
    "host", ["", "*", "0.0.0.0", "::", "silo", "10.0.0.1", "localhost.evil.org", "::ffff:10.0.0.1"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "0:0::", "::ffff:0.0.0.0"])
def test_wildcard(host: str) -> None:
    assert is_wildcard(host)


def test_not_a_wildcard() -> None:
    assert not is_wildcard("localhost")
    assert not is_wildcard("127.0.0.1")


def test_plaintext_stays_on_loopback_unless_it_is_written_out() -> None:
    check_plaintext(Address("127.0.0.1", 5), insecure=False)
    check_plaintext(Address("10.0.0.1", 5), insecure=True)
    with pytest.raises(ConfigError) as caught:
        check_plaintext(Address("::", 5), insecure=False)
    assert str(caught.value) == (
        "server.listen: [::]:5 is reachable from other machines, and without TLS anyone in between could "
        "read and alter the model and the updates; set server.tls, or use a loopback address such as "
        "127.0.0.1:5, or set server.insecure to true if the network itself is trusted"
    )
    with pytest.raises(ConfigError, match="silo:5 is reachable"):
        check_plaintext(Address("silo", 5), insecure=False)


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("ipv4:10.8.0.7:51234", "10.8.0.7:51234"),
        ("ipv6:%5B2001:db8::1%5D:51234", "[2001:db8::1]:51234"),
        ("unix:/run/x", "unix:/run/x"),
        ("", ""),
    ],
)
def test_a_peer_is_shown_as_people_write_it(peer: str, shown: str) -> None:
    assert shown_peer(peer) == shown
