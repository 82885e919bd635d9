"""What keeps a TLS connection from coming about, where gRPC says only that it was closed.

A server that refuses a worker's certificate, or finds plaintext where TLS was to come, closes the connection
without a word. A second connection, by the standard library, tells one from the other.
"""

from __future__ import annotations

import socket
import ssl

from afl.config.address import Address
from afl.errors import ConfigError
from afl_worker.credentials import CredentialFiles

TIMEOUT_S = 3.0
"""For each step of the second connection: a worker that is told to end waits for it."""


def diagnose(address: Address, files: CredentialFiles) -> str:
    """Why the server closes connections that have only begun; empty if nothing is found."""
    try:
        if files.authorities is None:
            return _of_plaintext(address)
        return _of_tls(address, files)
    except (OSError, ConfigError):
        return ""


def _of_plaintext(address: Address) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent to whoever it is.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _connected(address) as plain, context.wrap_socket(plain):
        return f"{address} speaks TLS, this worker plaintext; give its certificate's authority with --ca FILE"


def _of_tls(address: Address, files: CredentialFiles) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.authorities)
    context.set_alpn_protocols(["h2"])
    if files.certificate is not None and files.key is not None:
        context.load_cert_chain(files.certificate, files.key)
    name = files.server_name or address.host
    with _connected(address) as plain, context.wrap_socket(plain, server_hostname=name) as connection:
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


def _connected(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), TIMEOUT_S)
