"""Certificates and keys in files, read with the standard library: whether they fit, how long they hold."""

from __future__ import annotations

import datetime as dt
import logging
import re
import ssl
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from afl.daemon import events
from afl.errors import ConfigError
from afl.paths import from_start, opened

EXPIRES_SOON_S: Final = 14 * 24 * 3600.0  # how long before its end a certificate is warned of
_ENCRYPTED: Final = "the key is encrypted, and nobody can type its passphrase; decrypt it"
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)
# A certificate's dates in DER (RFC 5280, 4.1.2.5): a sequence of two, each UTCTime or GeneralizedTime.
_DATE: Final = rb"(?:\x17\x0d(\d{12}Z)|\x18\x0f(\d{14}Z))"
_DATES: Final = re.compile(rb"\x30[\x1e-\x22]" + _DATE + _DATE, re.DOTALL)

MOST_BYTES: Final = 16 * 1024**2
"""More than any bundle or list of tokens has; a device, which a path may name too, has no end."""

_VERSION: Final = 0xA0  # the tag of a certificate's version in DER
_LONGEST_NAME: Final = 200  # characters of an authority's name that are shown: whoever made it chose it


@dataclass(frozen=True)
class KeyPair:
    """A certificate with what leads up to its authority, and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def read_pair(certificate: Path, key: Path, *, names: tuple[str, str]) -> KeyPair:
    """Read a certificate and its key: :class:`ConfigError` unless they can be used and belong together.

    ``names`` are what messages call the two files, as ``name`` is below.
    """
    return _loaded(certificate, key, names)[0]


def server_context(certificate: Path, key: Path, *, names: tuple[str, str]) -> ssl.SSLContext:
    """What a server speaks TLS with, from files that are read as :func:`read_pair` does."""
    return _loaded(certificate, key, names)[1]


def _loaded(certificate: Path, key: Path, names: tuple[str, str]) -> tuple[KeyPair, ssl.SSLContext]:
    texts = [read_file(path, name) for path, name in zip((certificate, key), names, strict=True)]
    expires_at(texts[0], f"{names[0]} {certificate}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(from_start(certificate), from_start(key), password=_refuse_password)
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
    return KeyPair(*texts), context


def _refuse_password() -> str:
    # Without this, OpenSSL would ask on the terminal.
    raise ValueError(_ENCRYPTED)


def read_authorities(path: Path, name: str) -> bytes:
    """Read certificate authorities; :class:`ConfigError` if the file holds none or cannot be read."""
    text = read_file(path, name)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_ascii(text))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{name} {path} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"
        ) from error
    return text


def _ascii(pem: bytes) -> str:
    """As OpenSSL takes it: a bundle may name its authorities in UTF-8 between the certificates."""
    return pem.decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")


def read_file(path: Path, name: str) -> bytes:
    """The bytes of a file that a person named; :class:`ConfigError` if it cannot be read, or is too large."""
    try:
        with opened(from_start(path)) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror or error}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{name} {path} has more than {MOST_BYTES:,} bytes; name another file")
    return content


def expires_at(pem: bytes, source: str) -> float:
    """When the first certificate in PEM expires, in Unix time; :class:`ConfigError` if there is none."""
    return validity(pem, source)[1]


def validity(pem: bytes, source: str) -> tuple[float, float]:
    """From when on and until when the first certificate in PEM is valid, in Unix time.

    Raises:
        ConfigError: if there is none.
    """
    match = _PEM.search(_ascii(pem))
    if match is None:
        raise ConfigError(f"{source} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    try:
        *begin, short, long = _DATES.findall(ssl.PEM_cert_to_DER_cert(match[0]))[0]
        return _unix_time(*begin), _unix_time(short, long)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{source} holds a damaged certificate") from error


def _unix_time(short: bytes, long: bytes) -> float:
    # Two digits of a year: 50 to 99 are of the last century (RFC 5280, 4.1.2.5.1).
    digits = long or (b"19" if short[:2] >= b"50" else b"20") + short
    return dt.datetime.strptime(f"{digits.decode()}+0000", "%Y%m%d%H%M%SZ%z").timestamp()


def serial_of(pem: bytes, source: str) -> int:
    """The serial number of the first certificate in PEM (RFC 5280, 4.1.2.2).

    Raises:
        ConfigError: if there is none, or it is damaged.
    """
    try:
        fields = _fields(pem_certificates(pem)[0])
        return int.from_bytes(fields[1 if fields[0][0] == _VERSION else 0][1], signed=True)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{source} holds no certificate in PEM, or a damaged one") from error


def pem_certificates(pem: bytes) -> list[bytes]:
    """The certificates in PEM, in their order, as DER."""
    return [ssl.PEM_cert_to_DER_cert(match[0]) for match in _PEM.finditer(_ascii(pem))]


def missing_issuer(chain: Sequence[bytes], authorities: Sequence[bytes]) -> str:
    """The name of whom a chain of certificates, the leaf first, leads to, if it is none of the authorities.

    All are DER, and go by their names, not their signatures; an authority that another one has signed is no
    end. Empty if the chain leads to an authority, or cannot be read.
    """
    try:
        trusted = {subject for issuer, subject in map(_names, authorities) if issuer == subject}
        issuers = {subject: issuer for issuer, subject in map(_names, [*authorities, *chain])}
        name = _names(chain[0])[0]
        while name not in trusted and issuers.get(name, name) != name:
            name = issuers.pop(name)
        return "" if name in trusted else _shown_name(name)
    except (ValueError, IndexError):
        return ""


def _names(der: bytes) -> tuple[bytes, bytes]:
    """Issuer and subject of a certificate (RFC 5280, 4.1), as DER."""
    fields = _fields(der)
    # Version, serial number and signature algorithm come before; the version may be left out.
    first = 3 if fields[0][0] == _VERSION else 2
    return fields[first][1], fields[first + 2][1]


def _fields(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of what a certificate's authority has signed, in its order."""
    return _parts(_parts(_parts(der)[0][1])[0][1])


def _shown_name(name: bytes) -> str:
    """A name's attributes, the most specific first, each as its text: ``Issuing 7, Example Ltd``."""
    attributes = [_parts(attribute)[1][1] for _, group in _parts(name) for _, attribute in _parts(group)]
    text = ", ".join(value.decode(errors="replace") for value in reversed(attributes))
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_LONGEST_NAME]


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each value in DER that follow one another; ValueError if it is damaged."""
    parts, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size]), at + size
        if at + length > len(der):
            raise ValueError("cut off")
        parts.append((tag, der[at : at + length]))
        at += length
    return parts


def shown_time(unix: float) -> str:
    """A Unix time as messages show it, in UTC."""
    return dt.datetime.fromtimestamp(unix, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def warn_of_dates(logger: logging.Logger, name: str, path: Path, pem: bytes) -> float:
    """Log that a server's certificate expires soon, has expired or is not valid yet, if it is so.

    Returns:
        When it expires, in Unix time.

    Raises:
        ConfigError: if there is none in ``pem``.
    """
    begin, end = validity(pem, str(path))
    now = time.time()
    event = events.CertificateExpires(file=str(path), expires=end)
    if begin > now:
        said = f"is not valid before {shown_time(begin)}; is this machine's clock right?"
        logger.warning("%s %s %s", name, path, said, extra=event.extra)
    elif end - now < EXPIRES_SOON_S:
        said = f"{'expires' if end > now else 'expired'} on {shown_time(end)}"
        advice = "put a new one in its place, which is read without a restart"
        logger.warning("%s %s %s; %s", name, path, said, advice, extra=event.extra)
    return end


def warn_if_open(logger: logging.Logger, name: str, path: Path) -> None:
    """Log that every user of this machine can read a private file, if it is so."""
    try:
        mode = from_start(path).stat().st_mode
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
