"""What a worker shows of itself and whom it believes: files that may be replaced while it runs."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from afl.daemon import events
from afl.errors import ConfigError
from afl.security import certificates
from afl.security.identity import checked_token, parse_peer_keys

if TYPE_CHECKING:
    from afl.security.peers import PeerSigner, PeerTrust

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
        """Log what may go wrong: secrets that others can read, and a certificate that expires soon, has
        expired or is not valid yet."""
        for option, path in (("--key", self.key), ("--token-file", self.token_file)):
            if path is not None:
                certificates.warn_if_open(LOG, option, path)
        (begin, end), text = self._validity()
        if not begin <= time.time() < end - certificates.EXPIRES_SOON_S:
            event = events.CertificateExpires(file=str(self.certificate), expires=end)
            LOG.warning("%s", text, extra=event.extra)

    def out_of_date(self) -> str:
        """That this worker's own certificate has expired or is not valid yet, by this machine's clock; empty
        if it is valid. Raises ConfigError if it cannot be read."""
        (begin, end), text = self._validity()
        return "" if begin <= time.time() < end else text

    @property
    def certificate_expiry(self) -> float | None:
        """When this worker's own certificate expires, in Unix time; ``None`` if it has none, or none that can
        be read."""
        try:
            (_, end), _ = self._validity()
        except ConfigError:
            return None
        return end if math.isfinite(end) else None

    def _validity(self) -> tuple[tuple[float, float], str]:
        """From when on and until when this worker's certificate is valid, in Unix time, and what a message
        says of it."""
        if self.certificate is None:
            return (-math.inf, math.inf), ""
        pem = certificates.read_file(self.certificate, "--certificate")
        begin, end = certificates.validity(pem, str(self.certificate))
        if begin > time.time():
            when = f"is not valid before {certificates.shown_time(begin)}; is this machine's clock right?"
        else:
            when = f"{'expires' if end > time.time() else 'expired'} on {certificates.shown_time(end)}"
            when += "; put a new one in its place"
        return (begin, end), f"--certificate {self.certificate} {when}"


@dataclass(frozen=True)
class PeerFiles:
    """How this worker knows its peers, and shows them who it is, in runs with secure aggregation: by one of
    ``authorities``, ``keys`` and ``trusts_server``, or not at all. ``signing_key`` comes before the key of
    the ``certificate``."""

    authorities: Path | None = None
    keys: Path | None = None
    trusts_server: bool = False
    signing_key: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def says_whom_to_trust(self) -> bool:
        """Whether the command line says how peers are known."""
        return self.authorities is not None or self.keys is not None or self.trusts_server

    def read(self) -> tuple[PeerSigner, PeerTrust]:
        """What signs for this worker, and what it believes, by what the files hold now.

        Raises:
            ConfigError: a file cannot be used, one is missing, or the library cryptography is.
        """
        try:
            from afl.security.chains import Authorities  # noqa: PLC0415  # cryptography is optional
            from afl.security.peers import TrustInAuthorities, TrustInKeys, TrustInServer  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "a worker that checks who its peers are needs the library cryptography, 45 or newer: "
                "pip install 'afl[private]'"
            ) from error
        trust: PeerTrust
        if self.authorities is not None:
            pem = certificates.read_authorities(self.authorities, "--peer-ca")
            trust = TrustInAuthorities(Authorities(pem, f"--peer-ca {self.authorities}"))
        elif self.keys is not None:
            source = f"--peer-keys {self.keys}"
            text = certificates.read_file(self.keys, "--peer-keys").decode(errors="replace")
            trust = TrustInKeys(parse_peer_keys(text, source), source)
        elif self.trusts_server:
            trust = TrustInServer()
        else:
            raise ConfigError(
                "with secure aggregation a worker must know its peers itself: name the authority of their "
                "certificates with --peer-ca FILE, or a file of fingerprints of their keys with "
                "--peer-keys FILE"
            )
        return self._signer(), trust

    def _signer(self) -> PeerSigner:
        from afl.security.peers import PeerSigner  # noqa: PLC0415  # cryptography is optional

        if self.signing_key is not None:
            pem = certificates.read_file(self.signing_key, "--signing-key")
            return PeerSigner.of_key(pem, f"--signing-key {self.signing_key}")
        if self.certificate is not None and self.key is not None:
            pair = certificates.read_pair(self.certificate, self.key, names=("--certificate", "--key"))
            return PeerSigner.of_certificate(pair, f"--key {self.key}")
        if self.trusts_server:
            return PeerSigner.fresh()
        raise ConfigError(
            "this worker has nothing to show its peers who it is: give --certificate and --key, or "
            "--signing-key FILE"
        )

    def warn(self) -> None:
        """Log what may go wrong: a key that others can read, peers that nobody checks."""
        if self.signing_key is not None:
            certificates.warn_if_open(LOG, "--signing-key", self.signing_key)
        if self.trusts_server:
            LOG.warning(
                "--trust-server-keys: whose keys its peers have, only the server says; a server that puts "
                "its own in their place can read what this worker sends. Use --peer-ca or --peer-keys",
                extra=events.PeersUnchecked().extra,
            )
