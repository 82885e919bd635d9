"""Which chains of certificates a worker believes, and what is said of the others."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from afl.errors import ConfigError, PeerError
from afl.security.certificates import KeyPair
from afl.security.chains import Authorities, ids_of, read_chain
from support.identities import CA, BelowRoot, Holder, Identities, certified, new_key

# Past all that the tests will have issued, however long they wait for their turn.
NOW = dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)
DAY = dt.timedelta(days=1)
PATH_0 = x509.BasicConstraints(ca=True, path_length=0)
LEAF = x509.BasicConstraints(ca=False, path_length=None)
PURPOSES = ExtendedKeyUsageOID


def names(*uris: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])


THREE = names("afl:worker:3")


def usage(*what: str) -> x509.KeyUsage:
    kinds = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{kind: kind in what for kind in kinds.split()})


def check(root: Holder | Sequence[Holder], *chain: Holder, now: dt.datetime = NOW) -> None:
    roots = [root] if isinstance(root, Holder) else root
    authorities = Authorities(b"".join(each.pem.certificate for each in roots), "--peer-ca ca.pem")
    authorities.check(read_chain([each.der for each in chain]), now)


def refusal(root: Holder | Sequence[Holder], *chain: Holder, now: dt.datetime = NOW) -> str:
    with pytest.raises(PeerError) as caught:
        check(root, *chain, now=now)
    return str(caught.value)


@pytest.fixture(scope="module")
def root() -> Holder:
    return certified("root", CA)


@pytest.mark.parametrize("kind", ["p256", "p384", "p521", "rsa"])
def test_an_authority_with_no_extension_but_that_it_is_one(kind: str) -> None:
    own = certified("own root", CA, key=new_key(kind))
    for leaf in ("p256", "p384", "rsa", "ed25519"):
        check(own, certified("w", THREE, by=own, key=new_key(leaf)))
    assert "signature does not match" in refusal(own, certified("w", THREE, by=certified("own root", CA)))


def test_an_authority_as_step_ca_makes_it() -> None:
    """Its root and intermediate have a key usage and identifiers; a leaf has the purposes of both ends, and
    an extension of its own that is not critical."""
    critical = (x509.BasicConstraints, x509.KeyUsage)
    top = certified(
        "Smallstep Root CA",
        usage("key_cert_sign", "crl_sign"),
        x509.BasicConstraints(ca=True, path_length=1),
        critical=critical,
    )
    below = certified(
        "Smallstep Intermediate CA",
        usage("key_cert_sign", "crl_sign"),
        PATH_0,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(top.key.public_key()),
        by=top,
        critical=critical,
    )
    provisioner = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.37476.9000.64.1"), b"0\0")
    leaf = certified(
        "worker",
        usage("digital_signature"),
        x509.ExtendedKeyUsage([PURPOSES.SERVER_AUTH, PURPOSES.CLIENT_AUTH]),
        x509.SubjectKeyIdentifier.from_public_key(new_key().public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(below.key.public_key()),
        THREE,
        provisioner,
        by=below,
        critical=critical,
    )
    check(top, leaf, below)
    check(below, leaf)
    assert refusal(top, leaf) == (
        "its certificate leads to Smallstep Intermediate CA, which is not in --peer-ca ca.pem"
    )


def test_what_afl_certs_makes(tmp_path: Path) -> None:
    ours, others = Identities(tmp_path / "ours"), Identities(tmp_path / "others")
    authorities = Authorities(ours.ca.read_bytes(), "ca.pem")

    def leaf(pair: KeyPair) -> list[x509.Certificate]:
        return [x509.load_pem_x509_certificate(pair.certificate)]

    now = dt.datetime.now(dt.UTC)
    authorities.check(leaf(ours.issue_for_worker("3")), now)
    with pytest.raises(PeerError, match=r"^its certificate is refused: signature does not match$"):
        authorities.check(leaf(others.issue_for_worker("3")), now)
    with pytest.raises(PeerError, match="its extended key usage does not name clients"):
        authorities.check(leaf(ours.issue_for_server()), now)
    with pytest.raises(PeerError, match=r"its certificate expired on .* UTC by this machine's clock"):
        authorities.check(leaf(ours.issue_for_worker("3", days=-3)), now)
    # A new authority of the same name, beside the old one: either's certificates are believed.
    both = Authorities(ours.ca.read_bytes() + others.ca.read_bytes(), "ca.pem")
    for each in (ours, others):
        both.check(leaf(each.issue_for_worker("3")), now)


def test_when(root: Holder) -> None:
    leaf = certified("w", THREE, by=root, begin=NOW - DAY, end=NOW + DAY)
    check(root, leaf, now=NOW + 0.9 * DAY)
    day = f"{NOW + DAY:%Y-%m-%d %H:%M} UTC"
    said = f"its certificate expired on {day} by this machine's clock"
    assert refusal(root, leaf, now=NOW + 1.1 * DAY) == said
    assert refusal(root, leaf, now=NOW - 1.1 * DAY).startswith("its certificate is not valid before 2")
    old = certified("old root", CA, end=NOW - DAY)
    said = "an authority of its certificate expired on "
    assert refusal(old, certified("w", THREE, by=old)).startswith(said)
    middle = certified("middle", CA, by=root, begin=NOW + DAY)
    said = "an authority of its certificate is not valid before "
    assert refusal(root, certified("w", THREE, by=middle), middle).startswith(said)


def test_chains(root: Holder, tmp_path: Path) -> None:
    one = certified("one", CA, by=root)
    two = certified("two", CA, by=one)
    three = certified("three", CA, by=two)
    four = certified("four", CA, by=three)
    check(root, certified("w", THREE, by=three), three, two, one)
    check(root, certified("w", THREE, by=two), one, two)
    assert refusal(root, certified("w", THREE, by=two), two) == (
        "its certificate leads to one, which is not in --peer-ca ca.pem"
    )
    assert refusal(root, certified("w", THREE, by=four), four, three, two, one) == (
        "it shows more than 4 certificates, or 16,384 bytes of them"
    )
    large = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(20_000))
    assert refusal(root, certified("w", THREE, large, by=root)).startswith(
        "it shows more than 4 certificates"
    )
    below = BelowRoot(tmp_path)
    whole = x509.load_pem_x509_certificates(below.whole(below.worker("3")).certificate.read_bytes())
    Authorities(below.ca.read_bytes(), "ca.pem").check(whole, dt.datetime.now(dt.UTC))


def test_who_may_not_sign_a_certificate(root: Holder) -> None:
    plain = certified("leaf", THREE, by=root)
    told = certified("leaf", LEAF, THREE, by=root)
    no_usage = certified("middle", CA, usage("digital_signature"), by=root)
    of_servers = certified("middle", CA, x509.ExtendedKeyUsage([PURPOSES.SERVER_AUTH]), by=root)
    for signer, why in (
        (plain, "missing required extension"),
        (told, "basicConstraints.cA must be asserted"),
        (no_usage, "who signed it may not sign certificates"),
        (of_servers, "its extended key usage does not name clients"),
    ):
        assert why in refusal(root, certified("w", THREE, by=signer), signer)
    short = certified("short", PATH_0)
    middle = certified("middle", CA, by=short)
    check(short, certified("w", THREE, by=short))
    assert "path length" in refusal(short, certified("w", THREE, by=middle), middle)
    # Who signs itself is nobody's worker, whatever name it takes.
    assert "signature does not match" in refusal(root, certified("root", THREE))
    assert "nobody, which is not in" in refusal(root, certified("nobody", THREE))


def test_the_purposes_of_a_leaf(root: Holder) -> None:
    for purposes in ([PURPOSES.CLIENT_AUTH], [PURPOSES.ANY_EXTENDED_KEY_USAGE]):
        check(root, certified("w", THREE, x509.ExtendedKeyUsage(purposes), by=root))
    check(root, certified("w", THREE, usage("digital_signature"), by=root))
    for extension, why in (
        (x509.ExtendedKeyUsage([PURPOSES.SERVER_AUTH, PURPOSES.CODE_SIGNING]), "does not name clients"),
        (usage("key_encipherment"), "its key usage does not name signatures"),
    ):
        assert why in refusal(root, certified("w", THREE, extension, by=root))


def test_extensions_that_nobody_knows(root: Holder) -> None:
    unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\5\0")
    check(root, certified("w", THREE, unknown, by=root))
    must = certified("w", THREE, unknown, by=root, critical=[x509.UnrecognizedExtension])
    assert "critical extension" in refusal(root, must)


@pytest.mark.parametrize("is_critical", [True, False])
@pytest.mark.parametrize("excluded", [True, False])
def test_an_authority_that_is_constrained_in_uris_names_no_worker(excluded: bool, is_critical: bool) -> None:
    """RFC 5280, 4.2.1.10: a constraint is on a URI's host, and afl's URIs have none."""

    def constrained(name: x509.GeneralName) -> Holder:
        subtrees = (None, [name]) if excluded else ([name], None)
        constraints = x509.NameConstraints(*subtrees)
        critical = [x509.BasicConstraints, *([x509.NameConstraints] if is_critical else [])]
        return certified("root", CA, constraints, critical=critical)

    on_uris = constrained(x509.UniformResourceIdentifier(".example.org"))
    assert "name constraint" in refusal(on_uris, certified("w", THREE, by=on_uris))
    on_hosts = constrained(x509.DNSName("example.org"))
    check(on_hosts, certified("w", THREE, by=on_hosts))


@pytest.mark.parametrize(
    ("other", "ids"),
    [
        (x509.DNSName("afl:worker:3"), ""),
        (x509.RFC822Name("afl:worker:3"), ""),
        (x509.RegisteredID(x509.ObjectIdentifier("1.2.3")), ""),
        (x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "afl:worker:3")])), ""),
        (x509.OtherName(x509.ObjectIdentifier("1.2.3"), b"\x0c\x0cafl:worker:3"), ""),
        (x509.UniformResourceIdentifier("afl:worker:5-7"), "5-7"),
        (x509.UniformResourceIdentifier("afl:worker:3 "), ""),
        (x509.UniformResourceIdentifier("AFL:worker:3"), ""),
        (x509.UniformResourceIdentifier("https://example.org/afl:worker:3"), ""),
    ],
)
def test_only_uris_name_workers(root: Holder, other: x509.GeneralName, ids: str) -> None:
    leaf = certified("afl:worker:3", x509.SubjectAlternativeName([other]), by=root)
    check(root, leaf)
    assert str(ids_of(leaf.certificate)) == ids
    both = x509.SubjectAlternativeName([other, x509.UniformResourceIdentifier("afl:worker:9")])
    assert str(ids_of(certified("w", both, by=root).certificate)) == (f"{ids},9" if ids else "9")


def test_a_certificate_without_names(root: Holder) -> None:
    assert not ids_of(certified("afl:worker:3", by=root).certificate).ranges


def test_what_is_no_authority_is_said_at_once(root: Holder) -> None:
    for each in (certified("w", THREE), certified("w", LEAF, by=root), certified("w")):
        with pytest.raises(
            ConfigError, match=r"^--peer-ca f: CN=w is no authority, by its basic constraints"
        ):
            Authorities(root.pem.certificate + each.pem.certificate, "--peer-ca f")
    for_chains = certified("Ed", CA, key=new_key("ed25519"))
    with pytest.raises(ConfigError, match=r"^--peer-ca f: CN=Ed has neither an EC nor an RSA key"):
        Authorities(for_chains.pem.certificate, "--peer-ca f")
    damaged = root.pem.certificate.replace(b"MII", b"MIJ", 1).replace(b"\nMI", b"\nMJ", 1)
    with pytest.raises(ConfigError, match=r"^--peer-ca f holds a damaged certificate"):
        Authorities(damaged, "--peer-ca f")


def test_a_peer_s_words_fit_a_line() -> None:
    ours = certified("ours", CA)
    stranger = certified("\x1b[2J\nafl-worker: all is well", CA)
    said = refusal(ours, certified("w", THREE, by=stranger))
    assert said == "its certificate leads to ?[2J?afl-worker: all is well, which is not in --peer-ca ca.pem"
    no_client = x509.ExtendedKeyUsage([PURPOSES.SERVER_AUTH])
    assert refusal(ours, certified("a\nb)>x", THREE, no_client, by=ours)) == (
        "its certificate is refused: its extended key usage does not name clients"
    )
