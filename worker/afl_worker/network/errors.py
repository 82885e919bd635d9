"""Why there is no session, in words for the log.

gRPC's own words are long, and made for its developers. And a server that refuses a worker's certificate, or
finds plaintext where TLS was to come, closes the connection without a word: a second connection, by the
standard library, tells one from the other.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

from afl.config.address import Address
from afl.errors import ConfigError
from afl.security import certificates
from afl_worker.network.credentials import CredentialFiles

CUT = "the connection was cut"

UNTRUSTED = "is not signed by an authority in --ca"

_REASONS = {
    r"certificate has expired": (
        "the certificate of {there} has expired, by this machine's clock; renew it there"
    ),
    r"certificate is not yet valid": (
        "the certificate of {there} is not valid yet, by this machine's clock; is that right?"
    ),
    r"Hostname Verification Check failed": (
        "the certificate of {there} does not name {name}; use a name that it has, or give --server-name"
    ),
    r"CERTIFICATE_VERIFY_FAILED": (
        f"the certificate of {{there}} {UNTRUSTED} {{authorities}}; give its authority"
    ),
    r"WRONG_VERSION_NUMBER": "{there} does not speak TLS; set its server.tls, or leave out --ca",
    r"HTTP proxy returned": ("the environment's proxy refused to connect to {address}; --no-proxy avoids it"),
    r"Connection refused": (
        "nothing listens at {there}; is the server running, and is this its server.listen?"
    ),
    r"lookup error|lookup failed|DNS resolution failed|Domain name not found": (
        "no such host: {host}; is the name in --server right, and does this machine's DNS know it?"
    ),
    r"No route to host|Network is unreachable": (
        "the network has no route to {there}; is there a firewall or a VPN in between?"
    ),
    r"keepalive|ping timeout": "a ping to {there} was not answered",
    r"timed out": "{there} does not answer; is there a firewall in between?",
    r"http2 header with status: 413": ("a proxy before {there} lets no stream of this size pass (HTTP 413)"),
    r"http2 header with status: 50[234]": (
        "a proxy answers at {there}, the server behind it does not; is the server running?"
    ),
    r"parsing HTTP/2|Method not found|Unknown service|http2 header with status": (
        "what answers at {there} is not an afl server (is it the port of server.listen?)"
    ),
    r"RST_STREAM with error code (?P<code>[0-9]+)": (
        "the server, or a proxy before it, reset the stream (HTTP/2 error {code})"
    ),
    r"recvmsg|Connection reset|Broken pipe|Socket closed|Stream removed": CUT,
    r"RST_STREAM|GOAWAY|Cancelling all calls": CUT,
}
"""What gRPC's text holds (that of 1.85, and of some before it), and what is said instead."""

_PEER = re.compile(r"\bipv[46]:(\S+:([0-9]+)):? ")
"""Whom gRPC tried to reach, in its text: an address of the host, or of a proxy before it."""


def plain_reason(code: str, details: str, address: Address, files: CredentialFiles) -> str:
    """A few words for how gRPC ended a call: the status, such as ``unavailable``, and details in its text."""
    there = str(address)
    peer = _PEER.search(details)
    is_server = peer is None or int(peer[2]) == address.port
    if peer is not None and not is_server:
        there = f"{urllib.parse.unquote(peer[1])}, the environment's proxy (--no-proxy avoids it)"
    for pattern, reason in _REASONS.items():
        found = re.search(pattern, details, re.IGNORECASE)
        if found:
            # What to do is about the server, not about a proxy before it.
            shown = reason if is_server or "{there}" not in reason else reason.partition(";")[0]
            return shown.format(
                **found.groupdict(),
                address=address,
                there=there,
                host=address.host,
                name=files.server_name or address.host,
                authorities=files.authorities,
            )
    return f"{code}: {details}"


TIMEOUT_S = 3.0
"""For each step of the second connection: a worker that is told to end waits for it."""


def outbound_proxy(host: str, environment: Mapping[str, str]) -> urllib.parse.SplitResult | None:
    """The proxy by which gRPC reaches a host; ``None`` if it connects by itself.

    As grpc/doc/environment_variables.md has it: the first of ``grpc_proxy``, ``https_proxy`` and
    ``http_proxy`` that is set, unless the host's name ends in an entry of ``no_grpc_proxy`` or ``no_proxy``.
    """
    proxy = next(filter(None, map(environment.get, ("grpc_proxy", "https_proxy", "http_proxy"))), None)
    if proxy is None:
        return None
    left_out = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    if any(host.endswith(entry.strip()) for entry in left_out.split(",") if entry.strip()):
        return None
    return urllib.parse.urlsplit(proxy)


def why_untrusted(address: Address, files: CredentialFiles, *, use_proxy: bool) -> str:
    """Whose certificate is missing between the server's and those in ``--ca``; empty if that is not found."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # It is only looked at.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        assert files.authorities is not None
        authorities = certificates.pem_certificates(certificates.read_file(files.authorities, "--ca"))
        with (
            _connected(address, use_proxy=use_proxy) as plain,
            context.wrap_socket(plain, server_hostname=files.server_name or address.host) as connection,
        ):
            missing = certificates.missing_issuer(_sent_chain(connection), authorities)
    except (OSError, ValueError, ConfigError):
        return ""
    return missing and (
        f"the certificate of {address} {UNTRUSTED} {files.authorities}: it leads to {missing!r}. If that is"
        " an intermediate authority, append its certificate to the server's (server.tls.certificate);"
        " otherwise give it with --ca"
    )


def _sent_chain(connection: Any) -> list[bytes]:
    """The certificates that a server has sent, its own first, as DER."""
    if sys.version_info >= (3, 13):
        return [bytes(der) for der in connection.get_unverified_chain()]
    chain = connection._sslobj.get_unverified_chain()  # noqa: SLF001  # public from 3.13 on
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in chain]


def why_closed(address: Address, files: CredentialFiles, *, use_proxy: bool) -> str:
    """Why the server closes connections that have only begun; empty if nothing is found."""
    try:
        with _connected(address, use_proxy=use_proxy) as plain:
            if files.authorities is None:
                return _of_plaintext(plain, address)
            return _of_tls(plain, address, files)
    except (OSError, ValueError, ConfigError):
        return ""


def _of_plaintext(plain: socket.socket, address: Address) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent to whoever it is.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(plain):
        return f"{address} speaks TLS, this worker plaintext; give its certificate's authority with --ca FILE"


def _of_tls(plain: socket.socket, address: Address, files: CredentialFiles) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.authorities)
    context.set_alpn_protocols(["h2"])
    if files.certificate is not None and files.key is not None:
        context.load_cert_chain(files.certificate, files.key)
    name = files.server_name or address.host
    with context.wrap_socket(plain, server_hostname=name) as connection:
        try:
            if connection.recv(1):
                # The server's settings: it has taken the certificate, or wants none.
                return ""
        except TimeoutError:
            return ""
        except OSError:
            # A reset instead of an end, or an alert; each means the same.
            pass
    if files.certificate is None:
        return (
            f"{address} requires a certificate from this worker: give one with --certificate FILE --key FILE"
        )
    return f"{address} refuses this worker's certificate: {files.out_of_date() or _of_refused(files)}"


def _of_refused(files: CredentialFiles) -> str:
    assert files.certificate is not None
    assert files.authorities is not None
    given = ((files.certificate, "--certificate"), (files.authorities, "--ca"))
    own, authorities = (certificates.pem_certificates(certificates.read_file(*each)) for each in given)
    missing = certificates.missing_issuer(own, authorities)
    refused = (
        f"--certificate {files.certificate} is not signed by an authority that the server trusts"
        " (server.tls.client_ca), or is not for clients"
    )
    advice = "if that is an intermediate authority, append its certificate to that file"
    return f"{refused}. It leads to {missing!r}: {advice}" if missing else refused


def _connected(address: Address, *, use_proxy: bool) -> socket.socket:
    proxy = outbound_proxy(address.host, os.environ) if use_proxy else None
    if proxy is None or proxy.hostname is None:
        return socket.create_connection((address.host, address.port), TIMEOUT_S)
    tunnel = http.client.HTTPConnection(proxy.hostname, proxy.port or 443, timeout=TIMEOUT_S)
    headers = {}
    if proxy.username is not None:
        user = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    tunnel.set_tunnel(address.host, address.port, headers)
    tunnel.connect()
    return tunnel.sock
