"""Who a peer is, by its certificate and its token, and which workers it may speak for."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from afl.config.schema import Server, Tls
from afl.errors import ConfigError, RefusedError
from afl.security import certificates, identity
from afl.security.identity import Grant, HashEntry, Permission, Revoked
from afl_server.network.reloading import ReloadedFiles

LOG = logging.getLogger("afl.server")

_BEARER: Final = "bearer "
_NONE_REVOKED: Final = Revoked()


@dataclass(frozen=True)
class PeerIdentity:
    """What a peer has shown of itself, and what it may do.

    Attributes:
        names: the alternative names of its certificate that are URIs.
        token: the hash of its token; empty if it has shown none.
        tokens: those that were known when it was looked at.
        serial: of its certificate; ``None`` if it has shown none that can be read.
        revoked: the certificates that were revoked when it was looked at.
    """

    permission: Permission
    names: tuple[str, ...] = field(default=(), repr=False)
    token: str = field(default="", repr=False)
    tokens: tuple[HashEntry, ...] = field(default=(), repr=False)
    serial: int | None = None
    revoked: Revoked = field(default=_NONE_REVOKED, repr=False)

    @property
    def has_expired(self) -> bool:
        """Whether its certificate has, by this machine's clock."""
        expiry = self.permission.certificate_expiry
        return expiry is not None and expiry <= time.time()


@dataclass(frozen=True)
class Served:
    """What the server shows in a handshake, and whom it believes.

    Attributes:
        authorities: of the workers' certificates, as PEM; ``None`` if none is asked for.
        not_after: when the certificate expires, in Unix time.
    """

    pair: certificates.KeyPair
    authorities: bytes | None
    not_after: float


class Authentication:
    """The server's certificate, the authorities it believes and the tokens it knows.

    Raises:
        ConfigError: if one of the files cannot be used.
    """

    def __init__(self, server: Server) -> None:
        self.certificates: ReloadedFiles[Served] | None = None
        self._wants_certificate = False
        self._tokens: ReloadedFiles[tuple[HashEntry, ...]] | None = None
        self._revoked: ReloadedFiles[Revoked] | None = None
        if server.tls is not None:
            tls = server.tls
            paths = [path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None]
            self.certificates = ReloadedFiles("server.tls", paths, lambda: _served(tls))
            self._wants_certificate = tls.client_ca is not None
            if (revoked := tls.revoked) is not None:
                self._revoked = ReloadedFiles("server.tls.revoked", [revoked], lambda: _revoked(revoked))
        if server.tokens is not None:
            tokens = server.tokens
            self._tokens = ReloadedFiles("server.tokens", [tokens], lambda: _tokens(tokens))

    @property
    def expiry(self) -> float | None:
        """When the server's certificate expires, in Unix time; ``None`` in plaintext."""
        return None if self.certificates is None else self.certificates.current().not_after

    @property
    def description(self) -> str:
        """How peers are known, in a few words for the log."""
        transport = "plaintext" if self.certificates is None else "TLS"
        proofs = ["client certificates"] * self._wants_certificate + ["tokens"] * (self._tokens is not None)
        return f"{transport} with {' and '.join(proofs)}" if proofs else transport

    def identify(
        self, names: Sequence[str], authorization: Sequence[str], certificate: bytes = b""
    ) -> PeerIdentity:
        """Who a peer is.

        Args:
            names: the URIs among the alternative names of the certificate with which it made its connection.
            authorization: the values of its call's field of this name.
            certificate: the certificate itself, as PEM.
        """
        token = ""
        if len(authorization) == 1 and authorization[0].lower().startswith(_BEARER):
            token = identity.token_hash(authorization[0][len(_BEARER) :].strip())
        expiry = serial = None
        if certificate:
            # What cannot be read was verified all the same.
            with contextlib.suppress(ConfigError):
                expiry = certificates.expires_at(certificate, "the worker's certificate")
                serial = certificates.serial_of(certificate, "the worker's certificate")
        return self._identity(tuple(names), token, expiry, serial)

    def again(self, peer: PeerIdentity) -> PeerIdentity:
        """A peer that is in, by what is known now and the time; the same object if nothing has changed."""
        if (
            self._known_tokens() is peer.tokens
            and self._now_revoked() is peer.revoked
            and (peer.permission.refusal or not peer.has_expired)
        ):
            return peer
        return self._identity(peer.names, peer.token, peer.permission.certificate_expiry, peer.serial)

    def _known_tokens(self) -> tuple[HashEntry, ...]:
        return () if self._tokens is None else self._tokens.current()

    def _now_revoked(self) -> Revoked:
        return _NONE_REVOKED if self._revoked is None else self._revoked.current()

    def _identity(
        self, names: tuple[str, ...], token: str, expiry: float | None, serial: int | None
    ) -> PeerIdentity:
        tokens, revoked = self._known_tokens(), self._now_revoked()
        # TLS has looked at it in the first handshake only: a later one may take that up again.
        has_expired = expiry is not None and expiry <= time.time()
        refusal = ""
        grants: tuple[Grant, ...] = ()
        try:
            _check_certificate(expiry if has_expired else None, serial, revoked)
            grants = tuple(self._grants(names, token, tokens))
        except RefusedError as error:
            refusal = str(error)
        permission = Permission(refusal, grants, expiry, revoked.ids, may_return=has_expired)
        return PeerIdentity(permission, names, token, tokens, serial, revoked)

    def _grants(self, names: tuple[str, ...], token: str, tokens: tuple[HashEntry, ...]) -> Iterator[Grant]:
        """What a peer's proofs allow.

        Raises:
            RefusedError: if it may not come in.
        """
        if self._wants_certificate:
            ids = identity.ids_of_names(names)
            if not ids.ranges:
                raise RefusedError(
                    "this worker's certificate names no worker: it needs a URI among its subject alternative"
                    f" names, such as {identity.URI_PREFIX}3 or {identity.URI_PREFIX}0-9"
                )
            yield Grant("certificate", ids)
        if self._tokens is not None:
            if not token:
                raise RefusedError(
                    "this server requires a token: start the worker with --token-file FILE, or with AFL_TOKEN"
                    " in its environment"
                )
            found = identity.ids_of_hash(token, tokens)
            if found is None:
                raise RefusedError(
                    "this worker's token is not one that the server knows (server.tokens): was it replaced,"
                    " or is it another run's?"
                )
            yield Grant("token", found)


def _served(tls: Tls) -> Served:
    names = ("server.tls.certificate", "server.tls.key")
    pair = certificates.read_pair(tls.certificate, tls.key, names=names)
    authorities = None
    if tls.client_ca is not None:
        authorities = certificates.read_authorities(tls.client_ca, "server.tls.client_ca")
    not_after = certificates.warn_of_dates(LOG, names[0], tls.certificate, pair.certificate)
    certificates.warn_if_open(LOG, "server.tls.key", tls.key)
    return Served(pair, authorities, not_after)


def _check_certificate(expired: float | None, serial: int | None, revoked: Revoked) -> None:
    """Whether a certificate counts.

    Args:
        expired: when it has; ``None`` if it has not.

    Raises:
        RefusedError: if it does not count, or has a number that has to be known and cannot be read.
    """
    if expired is not None:
        raise RefusedError(f"this worker's certificate expired on {certificates.shown_time(expired)}")
    if serial in revoked.serials:
        raise RefusedError("this worker's certificate is revoked (server.tls.revoked): it needs another")
    if serial is None and revoked.serials:
        raise RefusedError("this worker's certificate has no serial number that can be read")


def _revoked(path: Path) -> Revoked:
    text = certificates.read_file(path, "server.tls.revoked").decode(errors="replace")
    return identity.parse_revoked(text, f"server.tls.revoked {path}")


def _tokens(path: Path) -> tuple[HashEntry, ...]:
    text = certificates.read_file(path, "server.tokens").decode(errors="replace")
    return identity.parse_tokens(text, f"server.tokens {path}")
