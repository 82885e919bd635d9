"""Which worker ids a certificate or a token allows; tokens at rest are hashes."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from afl.errors import ConfigError

# A certificate's subject alternative name of this kind, `afl:worker:0-9`, names the ids it speaks for.
URI_PREFIX: Final = "afl:worker:"
_RANGE: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", re.ASCII)
_SERIAL: Final = re.compile(r"serial=((?:[0-9a-f]{2}:?){1,64})", re.ASCII | re.IGNORECASE)
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_TOKEN: Final = re.compile(r"[!-~]{32,1024}", re.ASCII)
LARGEST_WORKER_ID: Final = 2**31 - 2
MOST_WORKERS_A_SESSION: Final = 65536  # what one process may host: a Join names each of them


@dataclass(frozen=True)
class WorkerIds:
    """Worker ids as ranges of a first and a last id, ascending, apart from each other, of any length."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> WorkerIds:
        """From ``3``, ``0-9`` or ``0-3,7``; ``ValueError`` if it is not of that form."""
        found = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if last < first:
                raise ValueError("worker ids are written 3, 0-9 or 0-3,7")
            found.append((first, last))
        return cls().united(found)

    @classmethod
    def of(cls, workers: Iterable[int]) -> WorkerIds:
        """Exactly these ids."""
        return cls().united((worker, worker) for worker in workers)

    def united(self, ranges: Iterable[tuple[int, int]]) -> WorkerIds:
        """These ids and those of further ranges."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, *ranges]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return WorkerIds(tuple(merged))

    def __contains__(self, worker: int) -> bool:
        return any(first <= worker <= last for first, last in self.ranges)

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)

    @property
    def named(self) -> str:
        """``worker 3`` or ``workers 0-3,7``, as sentences have them."""
        return f"worker {self}" if str(self).isdecimal() else f"workers {self}"


def ids_of_names(names: Iterable[str]) -> WorkerIds:
    """The ids that a certificate's alternative names allow; none for names of other kinds, or misspelt."""
    ids = WorkerIds()
    for name in names:
        with contextlib.suppress(ValueError):
            if name.startswith(URI_PREFIX):
                ids = ids.united(WorkerIds.parse(name.removeprefix(URI_PREFIX)).ranges)
    return ids


def new_token() -> str:
    """A fresh token, in characters that need no quoting."""
    # 256 random bits: only a search of all of them finds the token of a hash, so that a slow or salted hash
    # would add nothing.
    return secrets.token_urlsafe(32)


def checked_token(text: str, source: str) -> str:
    """A token without the whitespace around it; a :class:`ConfigError` names the source, never the token."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{source} holds no token: one has at least 32 characters, none of them a space; `afl certs DIR"
            " --workers N --tokens` makes some"
        )
    return token


def token_hash(token: str) -> str:
    """The hash that the server keeps of a token: ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


@dataclass(frozen=True)
class HashEntry:
    """A line of a file of tokens or of peers' keys: the hash of what may speak for these workers."""

    ids: WorkerIds
    hash: str


def parse_tokens(text: str, source: str) -> tuple[HashEntry, ...]:
    """The lines ``IDS sha256:HASH`` of a tokens file; empty lines and those that begin with # do not count.

    A :class:`ConfigError` names the line, but not what it holds: it may be a token by mistake.
    """
    return _parse_hashes(text, source, "token's hash, so no worker could join")


def parse_peer_keys(text: str, source: str) -> tuple[HashEntry, ...]:
    """The lines ``IDS sha256:HASH`` of a file of peers' keys, as in a tokens file.

    Raises:
        ConfigError: with the line that is wrong, but not what it holds: it may be of a private key.
    """
    return _parse_hashes(text, source, "key's fingerprint, so no peer would be known")


def _parse_hashes(text: str, source: str, missing: str) -> tuple[HashEntry, ...]:
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _HASH.fullmatch(words[1]):
            raise ConfigError(
                f"{source}:{number}: a line is IDS sha256:HASH, where HASH is 64 digits of 0-9a-f"
            )
        try:
            entries.append(HashEntry(WorkerIds.parse(words[0]), words[1]))
        except ValueError as error:
            raise ConfigError(f"{source}:{number}: {error}") from None
    if not entries:
        raise ConfigError(f"{source} holds no {missing}")
    return tuple(entries)


@dataclass(frozen=True)
class Revoked:
    """Certificates that count no longer: by their serial numbers, or whichever speak for these workers."""

    serials: frozenset[int] = frozenset()
    ids: WorkerIds = WorkerIds()


def parse_revoked(text: str, source: str) -> Revoked:
    """The lines ``serial=HEX`` and ``afl:worker:IDS`` of a list of revoked certificates, which may be empty.

    Empty lines and those that begin with # do not count.

    Raises:
        ConfigError: with the line that is wrong.
    """
    serials, ids = set(), WorkerIds()
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        if match := _SERIAL.fullmatch(entry):
            serials.add(int(match[1].replace(":", ""), 16))
            continue
        try:
            # What has another beginning is left with no ids.
            _, _, named = f" {entry}".partition(f" {URI_PREFIX}")
            ids = ids.united(WorkerIds.parse(named).ranges)
        except ValueError:
            raise ConfigError(
                f"{source}:{number}: a line is serial=HEX, as `openssl x509 -noout -serial` prints it, or"
                f" {URI_PREFIX}IDS, such as {URI_PREFIX}3"
            ) from None
    return Revoked(frozenset(serials), ids)


def ids_of_hash(presented: str, entries: Sequence[HashEntry]) -> WorkerIds | None:
    """The ids that a hash allows: those of all its lines; ``None`` if it has none."""
    known = [entry.ids for entry in entries if hmac.compare_digest(entry.hash, presented)]
    return WorkerIds().united(chain.from_iterable(ids.ranges for ids in known)) if known else None


@dataclass(frozen=True)
class Grant:
    """The workers that one proof of identity (``certificate`` or ``token``) allows."""

    proof: str
    ids: WorkerIds


@dataclass(frozen=True)
class Permission:
    """What a peer may do."""

    refusal: str = ""  # why it may not come in as any worker; empty if it may
    grants: tuple[Grant, ...] = ()  # all must allow a worker; if there are none, every worker is allowed
    certificate_expiry: float | None = None  # of the one that it has shown, if any, in Unix time
    revoked: WorkerIds = WorkerIds()  # workers that no certificate speaks for any more
    may_return: bool = False  # whether what refuses it is mended without the server's doing

    def forbids(self, workers: Sequence[int]) -> str:
        """Why the peer may not speak for these workers; empty if it may."""
        revoked = next((worker for worker in workers if worker in self.revoked), None)
        if revoked is not None:
            return f"certificates for worker {revoked} are revoked (server.tls.revoked)"
        for grant in self.grants:
            outside = next((worker for worker in workers if worker not in grant.ids), None)
            if outside is not None:
                other = f"one that names {URI_PREFIX}{outside}" if grant.proof == "certificate" else "another"
                return (
                    f"this worker's {grant.proof} speaks for {grant.ids.named}, not for worker {outside}:"
                    f" start it with an --id among those, or with {other}"
                )
        return self.refusal
