"""Who may read pages: whoever asks by a name that is this server's and, if there is one, has the token; and
the certificate that they are served with."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import ssl
from pathlib import Path
from typing import Final

from afl.config.schema import Server
from afl.daemon.hosts import OwnNames
from afl.daemon.http import Answer, Environ, text
from afl.security import certificates
from afl.security.identity import checked_token
from afl_server.network.reloading import ReloadedFiles

LOG = logging.getLogger("afl.server")

PROBES: Final = frozenset({"/healthz", "/readyz"})
"""Pages that anyone may read: they say no more than whether the server works."""

_NAMES: Final = ("server.http_certificate", "server.http_key")


class Access:
    """What a request must have.

    Args:
        server: the configuration's section.

    Raises:
        ConfigError: if the file of the token cannot be used.
    """

    def __init__(self, server: Server) -> None:
        listened = [] if server.http is None else [server.http.host]
        self._names = OwnNames(
            [*listened, *server.http_hosts],
            "this server is not known by the name in the request; ask by address, or list the name under "
            "server.http_hosts",
        )
        self._token: ReloadedFiles[str] | None = None
        if (path := server.http_token) is not None:
            self._token = ReloadedFiles("server.http_token", [path], lambda: _token(path))

    def refusal(self, path: str, environ: Environ) -> Answer | None:
        """What a request is answered with in place of its page; ``None`` if it may have that."""
        if path in PROBES:
            return None
        if (foreign := self._names.refusal(environ)) is not None:
            return foreign
        if self._token is None or _shows(environ.get("HTTP_AUTHORIZATION", ""), self._token.current()):
            return None
        refusal = text("401 Unauthorized", "this page needs the token of server.http_token\n")
        asked = ("WWW-Authenticate", 'Basic realm="afl: the token is the password", charset="UTF-8"')
        return refusal._replace(headers=[*refusal.headers, asked])


class PageCertificate:
    """The certificate that pages are served with.

    Raises:
        ConfigError: if its files cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = ReloadedFiles(_NAMES[0], [certificate, key], lambda: _context(certificate, key))

    @classmethod
    def of(cls, server: Server) -> PageCertificate | None:
        """As the configuration has it; ``None`` in plaintext."""
        if server.http_certificate is None or server.http_key is None:
            return None
        return cls(server.http_certificate, server.http_key)

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._files.current()[0]

    @property
    def expiry(self) -> float:
        """When the certificate expires, in Unix time."""
        return self._files.current()[1]


def _context(certificate: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    context = certificates.server_context(certificate, key, names=_NAMES)
    content = certificates.read_file(certificate, _NAMES[0])
    not_after = certificates.warn_of_dates(LOG, _NAMES[0], certificate, content)
    certificates.warn_if_open(LOG, _NAMES[1], key)
    return context, not_after


def _shows(authorization: str, token: str) -> bool:
    """Whether a request shows the token: as a bearer, or as the password of any user."""
    kind, _, shown = authorization.partition(" ")
    content = shown.strip().encode("latin-1", "replace")
    if kind.lower() == "basic":
        try:
            content = base64.b64decode(content, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(content, token.encode())


def _token(path: Path) -> str:
    certificates.warn_if_open(LOG, "server.http_token", path)
    content = certificates.read_file(path, "server.http_token").decode(errors="replace")
    return checked_token(content, f"server.http_token {path}")
