"""What a worker shows of itself and whom it believes: files that may be replaced while it runs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from afl.daemon import events
from afl.security.certificates import (
    EXPIRES_SOON_S,
    KeyPair,
    expires_at,
    read_authorities,
    read_file,
    read_pair,
    shown_time,
    warn_if_open,
)
from afl.security.identity import checked_token

LOG = logging.getLogger("afl.worker")

TOKEN_VARIABLE = "AFL_TOKEN"  # noqa: S105  # its name


@dataclass(frozen=True)
class Credentials:
    """What the files hold now.

    Attributes:
        authorities: of the server's certificate, as PEM; ``None`` for plaintext.
        server_name: the name that the server's certificate must have instead of the host; empty for the host.
    """

    authorities: bytes | None = None
    pair: KeyPair | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""


@dataclass(frozen=True)
class CredentialFiles:
    """Where credentials are.

    Attributes:
        authorities: of the server's certificate; ``None`` for plaintext.
        token: one that was given in the environment; a file's comes before it.
        server_name: the name that the server's certificate must have instead of the host; empty for the host.
    """

    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""

    @property
    def has_token(self) -> bool:
        """Whether a token would be sent."""
        return bool(self.token) or self.token_file is not None

    def read(self) -> Credentials:
        """What they hold now.

        Raises:
            ConfigError: if one cannot be used.
        """
        pair = None
        if self.certificate is not None and self.key is not None:
            pair = read_pair(self.certificate, self.key, names=("--certificate", "--key"))
        token = self.token
        if self.token_file is not None:
            text = read_file(self.token_file, "--token-file").decode(errors="replace")
            token = checked_token(text, f"--token-file {self.token_file}")
        return Credentials(
            None if self.authorities is None else read_authorities(self.authorities, "--ca"),
            pair,
            token,
            self.server_name,
        )

    def warn(self) -> None:
        """Log what may go wrong: secrets that others can read, a certificate that expires soon or has."""
        for option, path in (("--key", self.key), ("--token-file", self.token_file)):
            if path is not None:
                warn_if_open(LOG, option, path)
        if self.certificate is None:
            return
        end = _not_after(self.certificate)
        if end - time.time() < EXPIRES_SOON_S:
            LOG.warning(
                "%s",
                _expiring(self.certificate, end),
                extra=events.CertificateExpires(file=str(self.certificate), expires=end).extra,
            )

    def expired(self) -> str:
        """That this worker's own certificate has expired, by this machine's clock; empty if it has not.

        Raises:
            ConfigError: if it cannot be read.
        """
        if self.certificate is None:
            return ""
        end = _not_after(self.certificate)
        return "" if end > time.time() else _expiring(self.certificate, end)


def _not_after(certificate: Path) -> float:
    return expires_at(read_file(certificate, "--certificate"), str(certificate))


def _expiring(certificate: Path, end: float) -> str:
    verb = "expires" if end > time.time() else "expired"
    return f"--certificate {certificate} {verb} on {shown_time(end)}; put a new one in its place"
