"""What a worker says of a connection that fails (the texts are gRPC 1.85's own), and which proxy its second
connection takes: the one that gRPC takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from afl.config.address import Address
from afl_worker.network.credentials import CredentialFiles
from afl_worker.network.errors import outbound_proxy, plain_reason

ALL = "failed to connect to all addresses; last error:"

SAID = {
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:50051: Failed to connect to remote host: Connection refused": (
        "nothing listens at silo.example.org:50051; is the server running, and is this its server.listen?"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host: Connection refused": (
        "nothing listens at 127.0.0.1:9, the environment's proxy (--no-proxy avoids it)"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:3128: HTTP proxy returned response code 403": (
        "the environment's proxy refused to connect to silo.example.org:50051; --no-proxy avoids it"
    ),
    f"{ALL} UNKNOWN: ipv6:%5B2001:db8::1%5D:50051: Failed to connect to remote host: "
    "getsockopt(SO_ERROR): No route to host": (
        "the network has no route to silo.example.org:50051; is there a firewall or a VPN in between?"
    ),
    "errors resolving silo.example.org:50051: [field:hostname lookup error:address lookup failed for "
    "silo.example.org:50051: Domain name not found]": (
        "no such host: silo.example.org; is the name in --server right, and does this machine's DNS know it?"
    ),
    f"{ALL} UNAVAILABLE: ipv4:127.0.0.1:50051: Failed parsing HTTP/2 (Expected SETTINGS frame as the first "
    "frame, got frame type 79)": (
        "what answers at silo.example.org:50051 is not an afl server (is it the port of server.listen?)"
    ),
    "Method not found!": (
        "what answers at silo.example.org:50051 is not an afl server (is it the port of server.listen?)"
    ),
    f"{ALL} UNAVAILABLE: ipv4:127.0.0.1:50051: recvmsg:Connection reset by peer (104)": (
        "the connection was cut"
    ),
    "Stream removed (Socket closed)": "the connection was cut",
    "Cancelling all calls": "the connection was cut",
    "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))": (
        "the server, or a proxy before it, reset the stream (HTTP/2 error 2)"
    ),
    "Received http2 header with status: 413": (
        "a proxy before silo.example.org:50051 lets no stream of this size pass (HTTP 413)"
    ),
    "Received http2 header with status: 502": (
        "a proxy answers at silo.example.org:50051, the server behind it does not; is the server running?"
    ),
    "Received http2 header with status: 404": (
        "what answers at silo.example.org:50051 is not an afl server (is it the port of server.listen?)"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:50051: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
    "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK": (
        "the certificate of silo.example.org:50051 has expired, by this machine's clock; renew it there"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:50051: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
    "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate is not yet valid": (
        "the certificate of silo.example.org:50051 is not valid yet, by this machine's clock; is that right?"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:50051: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
    "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer "
    "certificate: OK": (
        "the certificate of silo.example.org:50051 is not signed by an authority in --ca ca.pem; give its "
        "authority"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:50051: Custom verification check failed with error: UNAUTHENTICATED: "
    "Hostname Verification Check failed.": (
        "the certificate of silo.example.org:50051 does not name silo.example.org; use a name that it has, "
        "or give --server-name"
    ),
    f"{ALL} UNKNOWN: ipv4:127.0.0.1:50051: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
    "error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification "
    "context: OK": "silo.example.org:50051 does not speak TLS; set its server.tls, or leave out --ca",
    "something new": "unavailable: something new",
}


@pytest.mark.parametrize("details", SAID)
def test_a_few_words(details: str) -> None:
    files = CredentialFiles(Path("ca.pem"))
    assert plain_reason("unavailable", details, Address("silo.example.org", 50051), files) == SAID[details]


FIRST, SECOND = "http://one.example:3128", "http://two.example:3128"


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"https_proxy": ""}, None),
        ({"https_proxy": FIRST}, "one.example"),
        ({"http_proxy": SECOND}, "two.example"),
        ({"http_proxy": SECOND, "https_proxy": FIRST}, "one.example"),
        ({"https_proxy": SECOND, "grpc_proxy": FIRST}, "one.example"),
        ({"https_proxy": FIRST, "no_proxy": "localhost, .example.org"}, None),
        ({"https_proxy": FIRST, "no_proxy": "other.org"}, "one.example"),
        ({"https_proxy": FIRST, "no_proxy": "silo.example.org", "no_grpc_proxy": "b.org"}, "one.example"),
        ({"https_proxy": FIRST, "no_proxy": ","}, "one.example"),
    ],
)
def test_the_proxy_is_the_one_that_grpc_takes(environment: dict[str, str], proxy: str | None) -> None:
    found = outbound_proxy("silo.example.org", environment)
    assert (None if found is None else found.hostname) == proxy
