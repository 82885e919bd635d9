"""What a worker shows of itself and whom it believes: files that may be replaced while it runs."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from afl.daemon import events
from afl.security import certificates
from afl.security.identity import checked_token

LOG = logging.getLogger("afl.worker")

TOKEN_VARIABLE = "AFL_TOKEN"  # noqa: S105  # its name


@dataclass(frozen=True)
class Credentials:
    """What the files hold now, as :class:`CredentialFiles` names it; authorities are PEM."""

    authorities: bytes | None = None
    pair: certificates.KeyPair | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""


@dataclass(frozen=True)
class CredentialFiles:
    """Where credentials are. Without ``authorities`` the connection is plaintext. A file's token comes before
    one that was given in the environment; an empty ``server_name`` stands for the host."""

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
        """What they hold now. Raises ConfigError if one cannot be used."""
        authorities, pair, token = None, None, self.token
        if self.certificate is not None and self.key is not None:
            pair = certificates.read_pair(self.certificate, self.key, names=("--certificate", "--key"))
        if self.token_file is not None:
            text = certificates.read_file(self.token_file, "--token-file").decode(errors="replace")
            token = checked_token(text, f"--token-file {self.token_file}")
        if self.authorities is not None:
            authorities = certificates.read_authorities(self.authorities, "--ca")
        return Credentials(authorities, pair, token, self.server_name)

    def warn(self) -> None:
        """Log what may go wrong: secrets that others can read, a certificate that expires soon or has."""
        for option, path in (("--key", self.key), ("--token-file", self.token_file)):
            if path is not None:
                certificates.warn_if_open(LOG, option, path)
        end, text = self._expiry()
        if end - time.time() < certificates.EXPIRES_SOON_S:
            event = events.CertificateExpires(file=str(self.certificate), expires=end)
            LOG.warning("%s", text, extra=event.extra)

    def expired(self) -> str:
        """That this worker's own certificate has expired, by this machine's clock; empty if it has not.
        Raises ConfigError if it cannot be read."""
        end, text = self._expiry()
        return text if end <= time.time() else ""

    def _expiry(self) -> tuple[float, str]:
        """When this worker's certificate expires, in Unix time, and how a message says that."""
        if self.certificate is None:
            return math.inf, ""
        pem = certificates.read_file(self.certificate, "--certificate")
        end = certificates.expires_at(pem, str(self.certificate))
        when = f"{'expires' if end > time.time() else 'expired'} on {certificates.shown_time(end)}"
        return end, f"--certificate {self.certificate} {when}; put a new one in its place"
