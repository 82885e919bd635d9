"""What keeps a TLS connection from coming about, where gRPC says only that it was closed.

A server that refuses a worker's certificate, or finds plaintext where TLS was to come, closes the connection
without a word. A second connection, by the standard library, tells one from the other.
"""

from __future__ import annotations

import base64
import http.client
import os
import socket
import ssl
import urllib.parse
from collections.abc import Mapping

from afl.config.address import Address
from afl.errors import ConfigError
from afl_worker.credentials import CredentialFiles

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


def diagnose(address: Address, files: CredentialFiles, *, use_proxy: bool) -> str:
    """Why the server closes connections that have only begun; empty if nothing is found."""
    try:
        with _connected(address, use_proxy=use_proxy) as plain:
            if files.authorities is None:
                return _of_plaintext(plain, address)
            return _of_tls(plain, address, files)
    except (OSError, ConfigError):
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
        return f"{address} wants a certificate of this worker: give one with --certificate FILE --key FILE"
    return f"{address} refuses this worker's certificate: " + (
        files.expired()
        or f"--certificate {files.certificate} is not by an authority that the server believes"
        " (server.tls.client_ca), or is not for clients"
    )


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
