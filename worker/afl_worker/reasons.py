"""Why there is no session, in words for the log; gRPC's own are long, and made for its developers."""

from __future__ import annotations

import re
import urllib.parse

from afl.config.address import Address
from afl_worker.credentials import CredentialFiles

CUT = "the connection was cut"

_REASONS = (
    (
        r"certificate has expired",
        "the certificate of {there} has expired, by this machine's clock; renew it there",
    ),
    (
        r"certificate is not yet valid",
        "the certificate of {there} is not valid yet, by this machine's clock; is that right?",
    ),
    (
        r"Hostname Verification Check failed",
        "the certificate of {there} does not name {name}; use a name that it has, or give --server-name",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "the certificate of {there} is not by an authority in --ca {authorities}; give its own authority",
    ),
    (r"WRONG_VERSION_NUMBER", "{there} does not speak TLS; set its server.tls, or leave out --ca"),
    (r"HTTP proxy returned", "the environment's proxy refused to connect to {address}; --no-proxy avoids it"),
    (
        r"Connection refused",
        "nothing listens at {there}; is the server running, and is this its server.listen?",
    ),
    (
        r"lookup error|lookup failed|DNS resolution failed|Domain name not found",
        "no such host: {host}; is the name in --server right, and does this machine's DNS know it?",
    ),
    (
        r"No route to host|Network is unreachable",
        "the network has no way to {there}; is there a firewall or a VPN between?",
    ),
    (r"keepalive|ping timeout", "a ping to {there} was not answered"),
    (r"timed out", "{there} does not answer; is there a firewall between?"),
    (
        r"parsing HTTP/2|Method not found|Unknown service|http2 header with status",
        "what answers at {there} is not an afl server (is it the port of server.listen?)",
    ),
    (
        r"recvmsg|Connection reset|Broken pipe|Socket closed|Stream removed|GOAWAY|Cancelling all calls",
        CUT,
    ),
)
"""What gRPC's text holds (that of 1.85, and of some before it), and what is said instead."""

_PEER = re.compile(r"\bipv[46]:(\S+:([0-9]+)):? ")
"""Whom gRPC tried to reach, in its text: an address of the host, or of a proxy before it."""


def plain_reason(code: str, details: str, address: Address, files: CredentialFiles) -> str:
    """A few words for how gRPC ended a call.

    Args:
        code: the status, such as ``unavailable``.
        details: gRPC's text.
        address: the server's.
        files: what the worker was to know the server by.
    """
    there = str(address)
    peer = _PEER.search(details)
    is_server = peer is None or int(peer[2]) == address.port
    if peer is not None and not is_server:
        there = f"{urllib.parse.unquote(peer[1])}, the environment's proxy (--no-proxy avoids it)"
    for pattern, reason in _REASONS:
        if re.search(pattern, details, re.IGNORECASE):
            # What to do is about the server, not about a proxy before it.
            shown = reason if is_server or "{there}" not in reason else reason.partition(";")[0]
            return shown.format(
                address=address,
                there=there,
                host=address.host,
                name=files.server_name or address.host,
                authorities=files.authorities,
            )
    return f"{code}: {details}"
