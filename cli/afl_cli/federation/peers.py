"""How the workers of a federation on this machine know each other, where their messages are masked."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from afl.errors import ConfigError, StorageError, why_unwritable
from afl.runs.durable import write_whole
from afl.security.certificates import read_file
from afl.security.identity import WorkerIds

MASKED_BITS: Final = 16

DAYS: Final = 7
"""How long a demo's certificates are valid."""

_MISSING: Final = "masks need the library cryptography, 45 or newer: pip install 'afl[private]'"


def by_key(folder: Path, workers: int) -> list[str]:
    """Options of all workers: they sign by one key, which is made if the folder has none.

    They are one user's on one machine: keys of their own would keep nobody out.

    Raises:
        ConfigError: if ``cryptography`` is missing, or the key that is there cannot be used.
        StorageError: if the files cannot be written.
    """
    try:
        from afl.security.keys import fingerprint_of_pem, new_signing_key  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    key, known = folder / "signing.key", folder / "peers.txt"
    _make(folder)
    if not key.exists():
        _write(key, new_signing_key())
    pem = read_file(key, "the workers' signing key")
    _write(known, f"{WorkerIds.of(range(workers))} {fingerprint_of_pem(pem, str(key))}\n".encode())
    # Of two workers each knows the other's part, which is no news to who has started both.
    fewest = ["--min-workers", "2"] if workers == 2 else []
    return ["--peer-keys", str(known), "--signing-key", str(key), *fewest]


def by_certificates(
    folder: Path, groups: Sequence[range]
) -> tuple[Mapping[str, str], Mapping[range, list[str]]]:
    """A new authority and what it signs: the section ``server.tls``, and each worker process's options.

    Raises:
        ConfigError: if ``cryptography`` is missing.
        StorageError: if the files cannot be written.
    """
    try:
        from afl.security.issuing import Authority  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    now = dt.datetime.now(dt.UTC)
    authority = Authority.make(now)
    _make(folder)
    # Its key is written nowhere: nobody can join these workers later.
    ca = folder / "ca.pem"
    _write(ca, authority.own().certificate)
    pairs = {"server": authority.for_server(["127.0.0.1"], now, DAYS)}
    pairs |= {f"worker-{ids}": authority.for_worker(ids, now, DAYS) for ids in map(_ids, groups)}
    for name, pair in pairs.items():
        _write(folder / f"{name}.key", pair.key)
        _write(folder / f"{name}.pem", pair.certificate)
    tls = {"certificate": folder / "server.pem", "key": folder / "server.key", "client_ca": ca}
    known = ["--ca", str(ca), "--peer-ca", str(ca)]
    options = {
        group: [
            *known,
            *("--certificate", str(folder / f"worker-{_ids(group)}.pem")),
            *("--key", str(folder / f"worker-{_ids(group)}.key")),
        ]
        for group in groups
    }
    return {key: str(path) for key, path in tls.items()}, options


def _ids(group: range) -> str:
    return str(WorkerIds.of(group))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {why_unwritable(error)}") from error


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content, mode=0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {why_unwritable(error)}") from error
