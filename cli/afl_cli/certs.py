"""``afl certs``: certificates, tokens and signing keys to begin with."""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from afl.config.address import parse_target
from afl.errors import AddressError, ConfigError, ExitCode, StorageError, why_unwritable
from afl.paths import expanded
from afl.runs.durable import write_whole
from afl.security.certificates import KeyPair, read_file
from afl.security.identity import HashEntry, new_token, parse_peer_keys, parse_tokens, token_hash

if TYPE_CHECKING:
    from afl.security.issuing import Authority

HELP = "make certificates, tokens and signing keys"

DEFAULT_SERVER = "localhost,127.0.0.1"
MOST_DAYS, MOST_WORKERS = 3650, 10_000

_SERVER_FILES: Final = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}

_SHOWN: Final = 20
"""The most file names that a message lists."""

_PUBLIC, _PRIVATE = 0o644, 0o600

_MISSING: Final = "afl certs needs the library cryptography, 45 or newer: pip install 'afl[certs]'"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    directory = "where the files go; an existing authority is used, and no file is overwritten"
    parser.add_argument("directory", type=expanded, metavar="DIR", nargs="?", help=directory)
    default = f"(default: those of the existing certificate, or {DEFAULT_SERVER})"
    server = f"names and addresses that workers reach the server by {default}"
    parser.add_argument("--server", metavar="HOST[,HOST...]", help=server)
    workers = "also for the workers 0 to N - 1 (default: 0)"
    parser.add_argument("--workers", type=int, default=0, metavar="N", help=workers)
    days = "how long the certificates are valid (default: 90)"
    parser.add_argument("--days", type=int, default=90, metavar="N", help=days)
    tokens = "also a token for each worker; the server's file has its hash"
    parser.add_argument("--tokens", action="store_true", help=tokens)
    signing = (
        "also a key for each worker with which it signs for its peers, and peers.txt, which every worker "
        "knows the others by (--peer-keys), for secure aggregation without certificates"
    )
    parser.add_argument("--signing-keys", action="store_true", help=signing)
    renew = "make the certificates of the server and of these workers again, with the same authority"
    parser.add_argument("--renew", action="store_true", help=renew)
    fingerprint = (
        "make nothing: print the fingerprint of the key in this file (a private or public key or a "
        "certificate, PEM) as a file for --peer-keys has it"
    )
    parser.add_argument("--fingerprint", type=expanded, metavar="FILE", help=fingerprint)


def run(options: argparse.Namespace) -> ExitCode:
    """Make what is missing, or print a key's fingerprint."""
    if options.fingerprint is not None:
        print(_fingerprint(options.fingerprint))
        return ExitCode.OK
    if options.directory is None:
        raise ConfigError("name a directory for the files: afl certs DIR")
    hosts = None if options.server is None else [_host(text.strip()) for text in options.server.split(",")]
    _check_range("--days", options.days, 1, MOST_DAYS)
    _check_range("--workers", options.workers, 0, MOST_WORKERS)
    for option, what in (("tokens", options.tokens), ("signing-keys", options.signing_keys)):
        if what and not options.workers:
            made = option.replace("-", " ")
            raise ConfigError(f"--{option} makes {made} for workers; say how many with --workers")
    folder = _Folder(options.directory)
    now = dt.datetime.now(dt.UTC)
    authority = folder.authority(now)
    if folder.wants("server", renew=options.renew):
        hosts = hosts or folder.hosts_before() or DEFAULT_SERVER.split(",")
        folder.write_pair("server", authority.for_server(hosts, now, options.days))
    for worker in map(str, range(options.workers)):
        if folder.wants(f"worker-{worker}", renew=options.renew):
            folder.write_pair(f"worker-{worker}", authority.for_worker(worker, now, options.days))
    if options.tokens:
        folder.tokens(range(options.workers))
    if options.signing_keys:
        folder.signing_keys(range(options.workers))
    print("\n".join(folder.report()))
    return ExitCode.OK


class _Folder:
    """The directory of certificates and tokens; notes which files it writes and which it keeps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[str] = []
        self._kept = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"{path} cannot be made: {why_unwritable(error)}"
            raise StorageError(f"{why}; name another directory") from error

    def authority(self, now: dt.datetime) -> Authority:
        """The directory's authority; a new one if it has none."""
        try:
            from afl.security.issuing import Authority  # noqa: PLC0415  # cryptography is optional
        except ImportError as error:
            raise ConfigError(_MISSING) from error
        certificate, key = self._path / "ca.pem", self._path / "ca.key"
        if not certificate.exists() and not key.exists():
            authority = Authority.make(now)
            self.write_pair("ca", authority.own())
            return authority
        another = "or name another directory for a new authority"
        for there, other in ((certificate, key), (key, certificate)):
            if not other.exists():
                raise ConfigError(f"{there} exists and {other} does not: put it back, {another}")
        self._kept += 1
        try:
            contents = read_file(certificate, "the authority"), read_file(key, "the authority's key")
            return Authority.read(*contents)
        except ConfigError as error:
            raise ConfigError(f"{certificate} and {key}: {error}; put them back, {another}") from error

    def wants(self, name: str, *, renew: bool) -> bool:
        """Whether a certificate is to be made: it is not there, or is to be made again."""
        there = (self._path / f"{name}.pem").exists() or (self._path / f"{name}.key").exists()
        self._kept += there and not renew
        return renew or not there

    def hosts_before(self) -> list[str]:
        """What the server's certificate that is there names."""
        from afl.security.issuing import hosts_of  # noqa: PLC0415  # cryptography is optional

        path = self._path / "server.pem"
        return hosts_of(read_file(path, "the server's certificate")) if path.exists() else []

    def write_pair(self, name: str, issued: KeyPair) -> None:
        """A certificate and its key; the key first: whoever sees the new certificate finds its key."""
        self._write(f"{name}.key", issued.key, _PRIVATE)
        self._write(f"{name}.pem", issued.certificate, _PUBLIC)

    def tokens(self, workers: Sequence[int]) -> None:
        """A token for each worker that the file of hashes does not name."""

        def make(worker: int) -> str:
            token = new_token()
            self._write(f"token-{worker}", f"{token}\n".encode(), _PRIVATE)
            return token_hash(token)

        self._complete("tokens", parse_tokens, "# IDS HASH; a worker's token is in token-ID", workers, make)

    def signing_keys(self, workers: Sequence[int]) -> None:
        """A signing key for each worker that the file of fingerprints does not name."""
        from afl.security.keys import fingerprint_of_pem, new_signing_key  # noqa: PLC0415  # as above

        def make(worker: int) -> str:
            path = self._path / f"signing-{worker}.key"
            if path.exists():
                return _fingerprint(path)
            key = new_signing_key()
            self._write(path.name, key, _PRIVATE)
            return fingerprint_of_pem(key, path.name)

        header = "# IDS FINGERPRINT; a worker's key is in signing-ID.key"
        self._complete("peers.txt", parse_peer_keys, header, workers, make)

    def _complete(
        self,
        name: str,
        parse: Callable[[str, str], Sequence[HashEntry]],
        header: str,
        workers: Sequence[int],
        make: Callable[[int], str],
    ) -> None:
        """Add a line to a file of hashes for each worker that it lacks, of what ``make`` writes for it."""
        path = self._path / name
        text = read_file(path, name).decode(errors="replace").rstrip() if path.exists() else ""
        known = [entry.ids for entry in parse(text, str(path))] if text else []
        text = text or header
        missing = [worker for worker in workers if not any(worker in ids for ids in known)]
        self._kept += len(workers) - len(missing)
        # Before the file itself: a hash of what was not written would be nobody's.
        text += "".join(f"\n{worker} {make(worker)}" for worker in missing)
        if missing:
            self._write(name, f"{text}\n".encode(), _PUBLIC)

    def report(self) -> list[str]:
        """What was done, and what to do with it."""
        kept = f"; {self._kept} that existed are kept (--renew makes certificates again)"
        files = _SERVER_FILES.items()
        pairs = (("--set", f"server.tls.{key}={self._path / name}") for key, name in files)
        settings = shlex.join(itertools.chain.from_iterable(pairs))
        made = [*self._made[:_SHOWN], *(["..."] if len(self._made) > _SHOWN else [])]
        lines = [
            f"made in {self._path}: {', '.join(made) or 'nothing'}{kept * bool(self._kept)}",
            f"keep {self._path / 'ca.key'} to yourself: whoever has it can act as any worker",
            f"for the server: {settings}",
            "for worker 0: --ca ca.pem --certificate worker-0.pem --key worker-0.key"
            if (self._path / "worker-0.pem").exists()
            else "for workers: name how many with --workers N, and each gets a certificate",
        ]
        if (self._path / "peers.txt").exists():
            lines.append("and with secure aggregation: --peer-keys peers.txt --signing-key signing-0.key")
        return lines

    def _write(self, name: str, content: bytes, mode: int) -> None:
        try:
            write_whole(self._path / name, content, mode=mode)
        except OSError as error:
            raise StorageError(f"{self._path / name} cannot be written: {error.strerror or error}") from error
        self._made.append(name)


def _fingerprint(path: Path) -> str:
    try:
        from afl.security.keys import fingerprint_of_pem  # noqa: PLC0415  # cryptography is optional
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    return fingerprint_of_pem(read_file(path, "--fingerprint"), str(path))


def _host(host: str) -> str:
    """A host that a certificate can name."""
    try:
        return parse_target(f"[{host}]:1" if ":" in host else f"{host}:1").host
    except AddressError as error:
        right = "the names and addresses that workers connect to, without ports, with commas between them"
        raise ConfigError(f"--server {host}: write {right}") from error


def _check_range(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option} {value}: a whole number from {least} to {most}")
