"""Certificates and keys in files, read with the standard library: whether they fit, how long they hold."""

from __future__ import annotations

import datetime as dt
import logging
import re
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from afl.daemon import events
from afl.errors import ConfigError

EXPIRES_SOON_S: Final = 14 * 24 * 3600.0  # how long before its end a certificate is warned of
_ENCRYPTED: Final = "the key is encrypted, and nobody can type its passphrase; decrypt it"
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)
# A certificate's dates in DER (RFC 5280, 4.1.2.5): a sequence of two, each UTCTime or GeneralizedTime.
_EXPIRY: Final = re.compile(
    rb"\x30[\x1e-\x22](?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12}Z)|\x18\x0f(\d{14}Z))", re.DOTALL
)


@dataclass(frozen=True)
class KeyPair:
    """A certificate with what leads up to its authority, and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def read_pair(certificate: Path, key: Path, *, names: tuple[str, str]) -> KeyPair:
    """Read a certificate and its key: :class:`ConfigError` unless they can be used and belong together.

    ``names`` are what messages call the two files, as ``name`` is below.
    """
    texts = [read_file(path, name) for path, name in zip((certificate, key), names, strict=True)]
    expires_at(texts[0], f"{names[0]} {certificate}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        if "MISMATCH" in reason:
            what = "do not belong together: the key is another certificate's"
        elif str(error) == _ENCRYPTED:
            what = f"cannot be used: {_ENCRYPTED}"
        else:
            what = f"cannot be used: is the second a private key in PEM? ({reason or error})"
        raise ConfigError(f"{names[0]} {certificate} and {names[1]} {key} {what}") from error
    again = [read_file(path, name) for path, name in zip((certificate, key), names, strict=True)]
    if again != texts:
        # What was checked need not be what was read; who replaces them is soon done.
        raise ConfigError(f"{names[0]} {certificate} and {names[1]} {key} are being replaced")
    return KeyPair(*texts)


def _refuse_password() -> str:
    # Without this, OpenSSL would ask on the terminal.
    raise ValueError(_ENCRYPTED)


def read_authorities(path: Path, name: str) -> bytes:
    """Read certificate authorities; :class:`ConfigError` if the file holds none or cannot be read."""
    text = read_file(path, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{name} {path} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"
        ) from error
    return text


def read_file(path: Path, name: str) -> bytes:
    """The bytes of a file that a person named; :class:`ConfigError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror or error}") from error


def expires_at(pem: bytes, source: str) -> float:
    """When the first certificate in PEM expires, in Unix time; :class:`ConfigError` if there is none."""
    match = _PEM.search(pem.decode("ascii", "replace"))
    if match is None:
        raise ConfigError(f"{source} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    try:
        short, long = _EXPIRY.findall(ssl.PEM_cert_to_DER_cert(match[0]))[0]
        # Two digits of a year: 50 to 99 are of the last century (RFC 5280, 4.1.2.5.1).
        digits = long or (b"19" if short[:2] >= b"50" else b"20") + short
        return dt.datetime.strptime(f"{digits.decode()}+0000", "%Y%m%d%H%M%SZ%z").timestamp()
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{source} holds a damaged certificate") from error


def shown_time(unix: float) -> str:
    """A Unix time as messages show it, in UTC."""
    return dt.datetime.fromtimestamp(unix, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def warn_if_open(logger: logging.Logger, name: str, path: Path) -> None:
    """Log that every user of this machine can read a private file, if it is so."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if mode & stat.S_IROTH:
        logger.warning(
            "%s %s can be read by every user of this machine (mode %04o); chmod 600 it",
            name,
            path,
            stat.S_IMODE(mode),
            extra=events.SecretIsReadable(file=str(path)).extra,
        )
