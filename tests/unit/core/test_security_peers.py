"""What a worker signs for its peers, and which signatures it believes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, padding, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import example, given
from hypothesis import strategies as st

from afl.errors import ConfigError, ExitCode, PeerError
from afl.security import keys
from afl.security.certificates import KeyPair
from afl.security.chains import Authorities
from afl.security.identity import HashEntry, WorkerIds, parse_peer_keys, token_hash
from afl.security.peers import PeerSigner, PeerTrust, Signed, TrustInAuthorities, TrustInKeys, TrustInServer
from support.identities import CA, BelowRoot, Holder, Identities, Signer, certified, new_key

# Past all that the tests will have issued, however long they wait for their turn.
NOW = dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)
STATEMENT = b"a statement"
KINDS = ("p256", "p384", "rsa", "ed25519")
HASH = token_hash("x")

ROOT = certified("root", CA)


def uris(*names: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name) for name in names])


WORKER = certified("w", uris("afl:worker:0-3", "afl:worker:7"), by=ROOT)
BY_ROOT = TrustInAuthorities(Authorities(ROOT.pem.certificate, "--peer-ca ca.pem"))


def of(holder: Holder) -> PeerSigner:
    return PeerSigner.of_certificate(holder.pem, "--key")


def with_key(key: Signer) -> PeerSigner:
    return PeerSigner.of_key(pem_of(key), "--signing-key")


def pem_of(key: Signer | dsa.DSAPrivateKey | x25519.X25519PrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def known(*lines: tuple[str, Signer]) -> TrustInKeys:
    text = "\n".join(f"{ids} {keys.fingerprint(key.public_key())}" for ids, key in lines)
    return TrustInKeys(parse_peer_keys(text, "peers.txt"), "--peer-keys peers.txt")


def refusal(
    trust: PeerTrust, signed: Signed, workers: tuple[int, ...] = (3,), statement: bytes = STATEMENT
) -> str:
    with pytest.raises(PeerError) as caught:
        trust.verify(workers, statement, signed, NOW)
    assert caught.value.exit_code == ExitCode.REFUSED
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_each_kind_by_itself_and_in_a_certificate(kind: str) -> None:
    key = new_key(kind)
    bare = with_key(key).sign(STATEMENT)
    assert bare.certificates == ()
    holder = certified("w", uris("afl:worker:3"), by=ROOT, key=key)
    shown = of(holder).sign(STATEMENT)
    assert (shown.certificates, shown.public_key) == ((holder.der,), b"")
    for trust, signed in (
        (BY_ROOT, shown),
        (known(("3", key)), shown),
        (known(("3", key)), bare),
        (TrustInServer(), shown),
        (TrustInServer(), bare),
    ):
        trust.verify([3], STATEMENT, signed, NOW)
        assert refusal(trust, signed, statement=b"another") == (
            "worker 3: the signature does not fit what is said to be signed"
        )


def test_how_many_bytes_a_peer_is_sent() -> None:
    """Beside what it signs: 64 of a signature and 44 of a key, or a certificate."""
    bare = with_key(new_key("ed25519")).sign(STATEMENT)
    assert (len(bare.signature), len(bare.public_key)) == (64, 44)
    sizes = {kind: len(with_key(new_key(kind)).sign(STATEMENT).signature) for kind in KINDS}
    assert sizes == {"p256": 64, "p384": 96, "rsa": 256, "ed25519": 64}


def test_what_afl_certs_makes_is_small(tmp_path: Path) -> None:
    ours = Identities(tmp_path)
    for ids in ("3", "9999"):
        signed = PeerSigner.of_certificate(ours.issue_for_worker(ids), "--key").sign(STATEMENT)
        assert len(signed.signature) + sum(map(len, signed.certificates)) <= 445


def test_who_signs_is_named_in_the_certificate() -> None:
    signed = of(WORKER).sign(STATEMENT)
    for workers in ((0,), (7,), (0, 1, 2, 3, 7)):
        BY_ROOT.verify(workers, STATEMENT, signed, NOW)
    said = "its certificate speaks for workers 0-3,7, not for worker"
    assert refusal(BY_ROOT, signed, (4,)) == f"worker 4: {said} 4"
    assert refusal(BY_ROOT, signed, (0, 1, 9)) == f"workers 0-1,9: {said} 9"
    assert refusal(BY_ROOT, signed, ()) == "a statement in the name of no worker"


def test_a_certificate_that_names_no_worker() -> None:
    names = [x509.DNSName("afl:worker:3"), x509.RFC822Name("afl:worker:3")]
    for extensions in ((), (x509.SubjectAlternativeName(names),), (uris("afl:server:3"),)):
        signed = of(certified("afl:worker:3", *extensions, by=ROOT)).sign(STATEMENT)
        assert refusal(BY_ROOT, signed) == (
            "worker 3: its certificate has no subject alternative name of type URI such as afl:worker:3"
        )


def test_another_s_certificate_does_not_make_a_signature_its_own() -> None:
    thief = with_key(new_key()).sign(STATEMENT)
    stolen = dataclasses.replace(of(WORKER).sign(STATEMENT), signature=thief.signature)
    assert "does not fit" in refusal(BY_ROOT, stolen)
    assert "does not fit" in refusal(known(("3", WORKER.key)), stolen)


def test_the_server_s_certificate_is_no_worker_s(tmp_path: Path) -> None:
    ours = Identities(tmp_path)
    trust = TrustInAuthorities(Authorities(ours.ca.read_bytes(), "--peer-ca ca.pem"))
    signed = PeerSigner.of_certificate(ours.issue_for_server(), "--key").sign(STATEMENT)
    assert "its extended key usage does not name clients" in refusal(trust, signed)


def test_a_chain_goes_along_without_its_root(tmp_path: Path) -> None:
    below = BelowRoot(tmp_path)
    pair = below.whole(below.worker("3"))
    whole = pair.certificate.read_bytes()
    signer = PeerSigner.of_certificate(KeyPair(whole + below.ca.read_bytes(), pair.key.read_bytes()), "--key")
    signed = signer.sign(STATEMENT)
    assert len(signed.certificates) == 2
    trust = TrustInAuthorities(Authorities(below.ca.read_bytes(), "--peer-ca ca.pem"))
    trust.verify([3], STATEMENT, signed, dt.datetime.now(dt.UTC))
    leaf_alone = dataclasses.replace(signed, certificates=signed.certificates[:1])
    assert refusal(trust, leaf_alone) == (
        "worker 3: its certificate leads to Acme Issuing 7, which is not in --peer-ca ca.pem"
    )


def test_without_a_certificate() -> None:
    signed = with_key(WORKER.key).sign(STATEMENT)
    assert refusal(BY_ROOT, signed).startswith(
        "worker 3: it shows no certificate, and this worker knows its peers by --peer-ca ca.pem"
    )


def test_fingerprints() -> None:
    one, other = new_key("ed25519"), new_key()
    trust = known(("0-1", one), ("5", other), ("7", one))
    trust.verify([0, 1, 7], STATEMENT, with_key(one).sign(STATEMENT), NOW)
    trust.verify([5], STATEMENT, with_key(other).sign(STATEMENT), NOW)
    signed = with_key(other).sign(STATEMENT)
    assert refusal(trust, signed, (0,)) == "worker 0: its key speaks for worker 5, not for worker 0"
    assert refusal(trust, signed, (5, 7)) == "workers 5,7: its key speaks for worker 5, not for worker 7"
    stranger = new_key("ed25519")
    assert refusal(trust, with_key(stranger).sign(STATEMENT), (0,)) == (
        f"worker 0: its key {keys.fingerprint(stranger.public_key())} is not in --peer-keys peers.txt"
    )


def test_a_known_key_in_a_certificate_of_nobody_is_known() -> None:
    """The certificate is only how the key travels: its own dates and names say nothing to a list of keys."""
    holder = certified("w", uris("afl:worker:9"), key=WORKER.key, end=NOW - dt.timedelta(days=1))
    signed = of(holder).sign(STATEMENT)
    known(("3", WORKER.key)).verify([3], STATEMENT, signed, NOW)
    assert "speaks for worker 3, not" in refusal(known(("3", WORKER.key)), signed, (9,))


def test_any_key_does_if_the_server_is_trusted() -> None:
    one, other = PeerSigner.fresh().sign(STATEMENT), PeerSigner.fresh().sign(STATEMENT)
    assert one.public_key != other.public_key
    TrustInServer().verify([3, 5], STATEMENT, one, NOW)
    swapped = dataclasses.replace(one, public_key=other.public_key)
    assert "does not fit" in refusal(TrustInServer(), swapped)


def test_keys_of_other_kinds() -> None:
    weak = rsa.generate_private_key(65537, 1024)
    others: list[Signer | dsa.DSAPrivateKey | x25519.X25519PrivateKey]
    others = [weak, new_key("p521"), dsa.generate_private_key(1024), x25519.X25519PrivateKey.generate()]
    for key in others:
        der = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for trust in (TrustInServer(), TrustInKeys([HashEntry(WorkerIds.of([3]), HASH)], "peers.txt")):
            assert refusal(trust, Signed(b"s" * 64, public_key=der)) == (
                "worker 3: its key is none of EC (P-256 or P-384), Ed25519 and RSA (2048 to 8192 bits), or "
                "damaged"
            )
        with pytest.raises(ConfigError, match=r"^the file cannot sign for a worker: the key is none of EC "):
            PeerSigner.of_key(pem_of(key), "the file")
    curve = certified("w", uris("afl:worker:3"), by=ROOT, key=new_key("p521"))
    forged = Signed(b"s" * 64, (curve.der,))
    for each in (BY_ROOT, TrustInServer()):
        assert refusal(each, forged).startswith("worker 3: its certificate's key is none of EC")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_signed_for_another_purpose_does_not_pass(kind: str) -> None:
    """A worker's key also signs for TLS, and perhaps for whoever else holds it."""
    key = new_key(kind)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        signature = key.sign(STATEMENT)
    elif isinstance(key, rsa.RSAPrivateKey):
        pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
        signature = key.sign(STATEMENT, pss, hashes.SHA256())
    else:
        signature = keys.sign(key, STATEMENT)
    signed = dataclasses.replace(with_key(key).sign(STATEMENT), signature=signature)
    assert keys.fits(key.public_key(), signature, STATEMENT)
    assert "does not fit" in refusal(TrustInServer(), signed)


def test_an_ecdsa_signature_has_one_form() -> None:
    key = new_key()
    signed = with_key(key).sign(STATEMENT)
    r, s = (int.from_bytes(half, "big") for half in (signed.signature[:32], signed.signature[32:]))
    for other in (
        encode_dss_signature(r, s),
        b"\0" + signed.signature,
        signed.signature + b"\0",
        b"",
        b"\0" * 64,
    ):
        assert "does not fit" in refusal(TrustInServer(), dataclasses.replace(signed, signature=other))


def test_numbers_of_an_ecdsa_signature_keep_their_length() -> None:
    """One in 128 signatures has a number that needs a byte less."""
    key = new_key()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signatures = [keys.sign(key, bytes([number % 256, number // 256])) for number in range(2000)]
    assert {len(signature) for signature in signatures} == {64}
    short = [at for at, each in enumerate(signatures) if 0 in (each[0], each[32])]
    assert short
    for at in short:
        assert keys.fits(key.public_key(), signatures[at], bytes([at % 256, at // 256]))


SIGNED = {
    "certificate": (BY_ROOT, of(WORKER).sign(STATEMENT)),
    "ed25519": (TrustInServer(), PeerSigner.fresh().sign(STATEMENT)),
    "ec": (TrustInServer(), with_key(new_key()).sign(STATEMENT)),
    "rsa": (TrustInServer(), with_key(new_key("rsa")).sign(STATEMENT)),
}


def flipped(content: bytes, bit: int) -> bytes:
    number = int.from_bytes(content, "big") ^ (1 << bit % (8 * len(content)))
    return number.to_bytes(len(content), "big")


@pytest.mark.parametrize("kind", SIGNED)
@given(bit=st.integers(0, 2**16))
@example(bit=0)
def test_one_bit_of_statement_or_signature(kind: str, bit: int) -> None:
    trust, signed = SIGNED[kind]
    trust.verify([3], STATEMENT, signed, NOW)
    assert "does not fit" in refusal(trust, signed, statement=flipped(STATEMENT, bit))
    assert "does not fit" in refusal(
        trust, dataclasses.replace(signed, signature=flipped(signed.signature, bit))
    )


@given(bit=st.integers(0, 2**16))
def test_one_bit_of_a_certificate_or_key(bit: int) -> None:
    """Whatever comes of it, it is refused by name; libraries warn of some."""
    trust, signed = SIGNED["certificate"]
    changed = dataclasses.replace(signed, certificates=(flipped(signed.certificates[0], bit),))
    _, bare = SIGNED["ed25519"]
    fingerprint = keys.fingerprint_of_pem(WORKER.pem.key, "key")
    listed = TrustInKeys([HashEntry(WorkerIds.of([3]), fingerprint)], "peers.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if _is_signed_alike(changed.certificates[0], signed.certificates[0]):
            # How many bits of a signature that ends in zeros are unused is not signed.
            trust.verify([3], STATEMENT, changed, NOW)
        else:
            refusal(trust, changed)
        refusal(TrustInServer(), dataclasses.replace(bare, public_key=flipped(bare.public_key, bit)))
        # A list of keys asks for the key alone.
        key = _key_of(changed.certificates[0])
        if key is None or keys.fingerprint(key) != fingerprint:
            refusal(listed, changed)
        else:
            listed.verify([3], STATEMENT, changed, NOW)


def _is_signed_alike(one: bytes, other: bytes) -> bool:
    """Whether two certificates say the same, under the same signature."""
    try:
        first, second = (x509.load_der_x509_certificate(der) for der in (one, other))
        kinds = first.signature_algorithm_oid, second.signature_algorithm_oid
    except keys.UNREADABLE:
        return False
    is_same = first.tbs_certificate_bytes == second.tbs_certificate_bytes
    return is_same and first.signature == second.signature and kinds[0] == kinds[1]


def _key_of(der: bytes) -> keys.PublicKey | None:
    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.issuer, certificate.subject, certificate.extensions  # noqa: B018  # damaged ones raise
        certificate.not_valid_before_utc, certificate.not_valid_after_utc  # noqa: B018
        return keys.checked(certificate.public_key())
    except keys.UNREADABLE:
        return None


@given(
    signature=st.binary(max_size=100),
    certificates=st.lists(st.binary(max_size=100) | st.just(WORKER.der), max_size=6).map(tuple),
    key=st.binary(max_size=100),
)
@example(signature=b"", certificates=(), key=b"")
def test_whatever_a_peer_says_it_is_a_peer_s_error(
    signature: bytes, certificates: tuple[bytes, ...], key: bytes
) -> None:
    for trust in (BY_ROOT, known(("3", WORKER.key)), TrustInServer()):
        refusal(trust, Signed(signature, certificates, key))


@pytest.mark.parametrize(
    "line",
    [
        "3",
        HASH,
        f"3 {HASH} 4",
        f"three {HASH}",
        f"3-1 {HASH}",
        f"-1 {HASH}",
        f"3 {HASH.removeprefix('sha256:')}",
        f"3 {HASH[:-1]}",
        f"3 {HASH}0",
        f"3 {HASH.upper()}",
        f"3 sha512:{HASH.removeprefix('sha256:')}",
        f"3,{HASH}",
        f"3 sha256: {HASH.removeprefix('sha256:')}",
        "3 SECRET",
        "-----BEGIN PRIVATE KEY-----",
    ],
)
def test_a_wrong_line_of_a_file_of_fingerprints(line: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^peers\.txt:2: (a line is IDS sha256:HASH|worker ids are)"
    ) as caught:
        parse_peer_keys(f"0 {HASH}\n{line}\n", "peers.txt")
    assert "SECRET" not in str(caught.value)


def test_a_file_without_a_fingerprint() -> None:
    with pytest.raises(
        ConfigError, match=r"^peers\.txt holds no key's fingerprint, so no peer would be known"
    ):
        parse_peer_keys("\n# 3 sha256\n", "peers.txt")


def test_the_fingerprint_of_a_key_is_the_same_in_every_form() -> None:
    public = WORKER.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    forms = (WORKER.pem.certificate, WORKER.pem.key, public, WORKER.pem.certificate + ROOT.pem.certificate)
    assert {keys.fingerprint_of_pem(form, "file") for form in forms} == {
        keys.fingerprint(WORKER.key.public_key())
    }


def test_a_fingerprint_of_nothing_that_signs() -> None:
    curve = certified("w", key=new_key("p521"))
    for pem, said in (
        (b"", "neither a key nor a certificate in PEM"),
        (f"3 {HASH}".encode(), "neither a key nor a certificate in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----", "holds no private key in PEM"),
        (
            b"-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----",
            "cannot sign for a worker: its key is none",
        ),
        (curve.pem.certificate, "cannot sign for a worker: its key is none of"),
        (curve.pem.key, "cannot sign for a worker: the key is none of"),
    ):
        with pytest.raises(ConfigError, match=r"^file ") as caught:
            keys.fingerprint_of_pem(pem, "file")
        assert said in str(caught.value)


def test_a_signing_key_that_cannot_be_used() -> None:
    locked = new_key("ed25519").private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
    makers: list[tuple[Callable[[], bytes], str]] = [
        (lambda: locked, "^key is encrypted, and nobody can type its passphrase"),
        (lambda: WORKER.pem.certificate, "^key holds no private key in PEM"),
        (lambda: b"", "^key holds no private key in PEM"),
    ]
    for make, said in makers:
        with pytest.raises(ConfigError, match=said):
            PeerSigner.of_key(make(), "key")


def test_a_new_signing_key_signs() -> None:
    one, other = keys.new_signing_key(), keys.new_signing_key()
    assert one != other
    signed = PeerSigner.of_key(one, "key").sign(STATEMENT)
    entry = HashEntry(WorkerIds.of([3]), keys.fingerprint_of_pem(one, "key"))
    TrustInKeys([entry], "peers.txt").verify([3], STATEMENT, signed, NOW)
