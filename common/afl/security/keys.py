"""Keys that sign what a worker tells its peers, and their fingerprints. Needs ``cryptography``."""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from afl.errors import ConfigError
from afl.security.certificates import pem_certificates

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey

UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises for keys and certificates that are damaged, or of a kind that it does not know."""

_HASHES: Final = {"secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384()}
_PSS: Final = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
_RSA_BITS: Final = range(2048, 8193)  # a larger one would keep whoever checks its signature busy
UNUSABLE: Final = "is none of EC (P-256 or P-384), Ed25519 and RSA (2048 to 8192 bits), or damaged"
"""What a message says of a key that cannot sign."""


def checked(key: object) -> PublicKey:
    """The key, if it is of a kind that signs statements; ``ValueError`` if it is not."""
    match key:
        case ed25519.Ed25519PublicKey():
            return key
        case ec.EllipticCurvePublicKey() if key.curve.name in _HASHES:
            return key
        case rsa.RSAPublicKey() if key.key_size in _RSA_BITS:
            return key
    raise ValueError(UNUSABLE)


def read_private_key(pem: bytes, source: str) -> PrivateKey:
    """From PEM, not encrypted. Raises ConfigError, which begins with ``source``, if it cannot sign."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except TypeError as error:
        raise ConfigError(f"{source} is encrypted, and nobody can type its passphrase; decrypt it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{source} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)") from error
    try:
        checked(key.public_key())
    except ValueError as error:
        raise ConfigError(f"{source} cannot sign for a worker: the key {error}") from error
    assert isinstance(key, PrivateKey)
    return key


def new_signing_key() -> bytes:
    """A fresh Ed25519 key, as PEM: it and its signatures are the smallest."""
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def sign(key: PrivateKey, text: bytes) -> bytes:
    """Ed25519; RSA-PSS with SHA-256; or ECDSA with SHA-256 (P-256) or SHA-384 (P-384), as r and s,
    big-endian, each as long as the curve's order."""
    match key:
        case ed25519.Ed25519PrivateKey():
            return key.sign(text)
        case rsa.RSAPrivateKey():
            return key.sign(text, _PSS, hashes.SHA256())
    numbers = decode_dss_signature(key.sign(text, ec.ECDSA(_HASHES[key.curve.name])))
    return b"".join(number.to_bytes(_order_bytes(key.curve), "big") for number in numbers)


def fits(key: PublicKey, signature: bytes, text: bytes) -> bool:
    """Whether the signature of the text is this key's, as :func:`sign` makes it."""
    try:
        match key:
            case ed25519.Ed25519PublicKey():
                key.verify(signature, text)
            case rsa.RSAPublicKey():
                key.verify(signature, text, _PSS, hashes.SHA256())
            case _:
                size = _order_bytes(key.curve)
                if len(signature) != 2 * size:
                    return False
                r, s = (int.from_bytes(half, "big") for half in (signature[:size], signature[size:]))
                key.verify(encode_dss_signature(r, s), text, ec.ECDSA(_HASHES[key.curve.name]))
    except InvalidSignature:
        return False
    return True


def public_der(key: PublicKey) -> bytes:
    """Its SubjectPublicKeyInfo."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: PublicKey) -> str:
    """``sha256:`` and 64 hexadecimal digits, of its SubjectPublicKeyInfo in DER."""
    return f"sha256:{hashlib.sha256(public_der(key)).hexdigest()}"


def fingerprint_of_pem(pem: bytes, source: str) -> str:
    """That of the key in a certificate, or of a private or a public key.

    Raises:
        ConfigError: there is none, or one that cannot sign for a worker; begins with ``source``.
    """
    try:
        if ders := pem_certificates(pem):
            return fingerprint(checked(x509.load_der_x509_certificate(ders[0]).public_key()))
        if b"PUBLIC KEY-----" in pem:
            return fingerprint(checked(serialization.load_pem_public_key(pem)))
    except UNREADABLE as error:
        raise ConfigError(f"{source} cannot sign for a worker: its key {UNUSABLE}") from error
    if b"PRIVATE KEY-----" not in pem:
        raise ConfigError(f"{source} holds neither a key nor a certificate in PEM (-----BEGIN ...-----)")
    return fingerprint(read_private_key(pem, source).public_key())


def _order_bytes(curve: ec.EllipticCurve) -> int:
    return (curve.key_size + 7) // 8
