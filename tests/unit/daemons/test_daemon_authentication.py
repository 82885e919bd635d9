"""Who may come in, and files that are replaced while the server runs."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from afl.config import config_from_mapping
from afl.errors import ConfigError
from afl_server.network import reloading
from afl_server.network.authentication import Authentication
from support.identities import Identities, serial_line, tls


def gate_of(**server: Any) -> Authentication:
    algorithm = {"name": "afl-br", "rounds": 1, "eta_w": 1.0, "eta_q": 0.0}
    values = {"workers": 9, "task": {"name": "digits"}, "algorithm": algorithm, "server": server}
    return Authentication(config_from_mapping(values).server)


def token_of(path: Path) -> list[str]:
    return [f"Bearer {path.read_text(encoding='utf-8').strip()}"]


@pytest.fixture
def ours(tmp_path: Path) -> Identities:
    return Identities(tmp_path / "pki")


def test_whoever_comes_is_believed_where_nothing_is_asked_for(ours: Identities) -> None:
    for gate in (gate_of(), gate_of(tls=tls(ours.server()))):
        identity = gate.identify(["afl:worker:1"], ["Bearer x", "y"])
        assert (
            identity.permission.refusal,
            identity.permission.grants,
            identity.permission.forbids([0, 8]),
        ) == ("", (), "")
        assert gate.again(identity) is identity
        assert gate.identify([], []).permission.forbids([0, 8]) == ""


@pytest.mark.parametrize(
    "authorization",
    [[], [""], ["Bearer"], ["Basic abc"], ["TOKEN"], ["Bearer TOKEN", "Bearer TOKEN"]],
)
def test_what_is_no_token(ours: Identities, authorization: list[str]) -> None:
    token = token_of(ours.token("3"))[0].removeprefix("Bearer ")
    gate = gate_of(tokens=str(ours.tokens))
    identity = gate.identify([], [value.replace("TOKEN", token) for value in authorization])
    assert identity.permission.refusal.startswith("this server requires a token")
    assert identity.permission.forbids([3]) == identity.permission.refusal
    assert token not in identity.permission.refusal


def test_a_certificate_and_a_token_must_both_allow(ours: Identities) -> None:
    path = ours.token("0-5")
    gate = gate_of(tls=tls(ours.server(), ours.ca), tokens=str(ours.tokens))
    identity = gate.identify(["afl:worker:4-8"], token_of(path))
    assert identity.permission.forbids([4, 5]) == ""
    assert "certificate speaks for workers 4-8, not for worker 3" in identity.permission.forbids([3, 4])
    assert "token speaks for workers 0-5, not for worker 6" in identity.permission.forbids([5, 6])
    assert identity.permission.forbids([]) == ""


def test_an_unknown_token_is_not_shown(ours: Identities) -> None:
    ours.token("0")
    unknown = ours.token("3", is_known=False)
    identity = gate_of(tokens=str(ours.tokens)).identify([], token_of(unknown))
    assert "token is not one that the server knows" in identity.permission.refusal
    assert token_of(unknown)[0].removeprefix("Bearer ") not in identity.permission.refusal


def test_tokens_are_read_again_and_a_broken_file_changes_nothing(
    ours: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ours.token("0"), ours.token("3", is_known=False)
    gate = gate_of(tokens=str(ours.tokens))
    whole = ours.tokens.read_bytes()
    ours.tokens.write_bytes(whole + b"3 sha256:\n")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert gate.identify([], token_of(first)).permission.forbids([0]) == ""
        ours.tokens.unlink()
        for _ in range(3):
            assert gate.identify([], token_of(first)).permission.forbids([0]) == ""
        ours.know("3", token_of(second)[0].removeprefix("Bearer "))
        assert gate.identify([], token_of(second)).permission.forbids([3]) == ""
        assert gate.identify([], token_of(first)).permission.refusal
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert events == ["reload_failed", "reload_failed", "reloaded"]
    assert "what was there before stays in use: server.tokens" in caplog.records[0].getMessage()
    assert "cannot be read: No such file" in caplog.records[1].getMessage()


def test_tokens_that_could_not_be_read_for_a_moment_are_tried_again(
    ours: Identities, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all descriptors are in use: the file itself does not change again."""
    first, second = token_of(ours.token("0")), token_of(ours.token("3", is_known=False))
    gate = gate_of(tokens=str(ours.tokens))
    ours.know("3", second[0].removeprefix("Bearer "))
    monkeypatch.setattr(reloading, "RETRY_S", 0.0)
    with caplog.at_level(logging.INFO):
        with monkeypatch.context() as moment:
            moment.setattr(Path, "open", no_descriptor)
            for _ in range(3):
                assert gate.identify([], first).permission.forbids([0]) == ""
            assert gate.identify([], second).permission.refusal
        assert gate.identify([], second).permission.forbids([3]) == ""
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert events == ["reload_failed", "reloaded"]
    assert "cannot be read: Too many open files" in caplog.records[0].getMessage()


def no_descriptor(path: object, *_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)


def test_a_peer_that_is_in_is_looked_at_again_once_tokens_have_changed(ours: Identities) -> None:
    path = ours.token("0-5")
    gate = gate_of(tls=tls(ours.server(), ours.ca), tokens=str(ours.tokens))
    first = gate.identify(["afl:worker:4-8"], token_of(path))
    assert gate.again(first) is first
    ours.token("7")
    second = gate.again(first)
    assert second is not first
    assert second.permission.forbids([4, 5]) == ""
    ours.tokens.write_text(ours.tokens.read_text(encoding="utf-8").replace("0-5 ", "0-4 "), encoding="utf-8")
    assert "token speaks for workers 0-4, not for worker 5" in gate.again(second).permission.forbids([4, 5])
    ours.tokens.unlink()
    ours.token("7")
    assert "token is not one that the server knows" in gate.again(second).permission.forbids([4])


def test_a_certificate_is_read_again_once_its_key_is_there_too(
    ours: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    pair, renewed = ours.server(days=20), ours.server("renewed", days=40)
    gate = gate_of(tls=tls(pair))
    assert gate.certificates is not None
    before = gate.certificates.current()
    with caplog.at_level(logging.INFO):
        pair.certificate.write_bytes(renewed.certificate.read_bytes())
        assert gate.certificates.current() is before
        pair.key.write_bytes(renewed.key.read_bytes())
        after = gate.certificates.current()
        assert gate.certificates.current() is after
        pair.key.touch()
        assert gate.certificates.current() is after, "the same content is no change"
    assert after.pair.key == renewed.key.read_bytes()
    assert gate.expiry == after.not_after > before.not_after
    assert [record.event for record in caplog.records] == ["reload_failed", "reloaded"]  # type: ignore[attr-defined]
    assert "do not belong together" in caplog.records[0].getMessage()


def test_what_expires_and_what_others_can_read_is_logged(
    ours: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    pair = ours.server(days=3)
    pair.key.chmod(0o644)
    gate_of(tls=tls(pair))
    gate_of(tls=tls(ours.server("old", days=-3)))
    gate_of(tls=tls(ours.early("3")))
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert events == ["certificate_expires", "secret_is_readable", *["certificate_expires"] * 2]
    first, second, third, fourth = [record.getMessage() for record in caplog.records]
    assert "server.pem expires on 2" in first
    assert "server.key can be read by every user of this machine (mode 0644); chmod 600 it" in second
    assert "old.pem expired on 2" in third
    assert "early-3.pem is not valid before 2" in fourth


def test_files_that_cannot_be_used_end_the_start(ours: Identities, tmp_path: Path) -> None:
    pair = ours.server()
    with pytest.raises(ConfigError, match=r"server.tls.client_ca .* holds no certificate"):
        gate_of(tls=tls(pair, pair.key))
    with pytest.raises(ConfigError, match=r"server.tokens .*nowhere cannot be read"):
        gate_of(tokens=str(tmp_path / "nowhere"))


def test_a_certificate_counts_until_it_expires_or_is_revoked(
    ours: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("# nobody yet\n", encoding="utf-8")
    gate = gate_of(tls={**tls(ours.server(), ours.ca), "revoked": str(revoked)})
    pair, other = ours.worker("3-4", days=1), ours.worker("3-4", "other")
    shown = [(["afl:worker:3-4"], p.certificate.read_bytes()) for p in (pair, other)]
    first, second = (gate.identify(names, [], pem) for names, pem in shown)
    assert first.permission.forbids([3, 4]) == second.permission.forbids([3, 4]) == ""
    assert gate.again(first) is first

    revoked.write_text(serial_line(pair), encoding="utf-8")
    now = gate.again(first).permission
    assert "certificate is revoked" in now.forbids([3])
    assert not now.may_return
    assert gate.again(second).permission.forbids([3, 4]) == ""
    assert "no serial number that can be read" in gate.identify(shown[0][0], [], b"").permission.refusal

    revoked.write_text("afl:worker:4\n", encoding="utf-8")
    assert gate.again(second).permission.forbids([3]) == ""
    assert "certificates for worker 4 are revoked" in gate.again(second).permission.forbids([3, 4])

    later = time.time() + 2 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    late = gate.again(gate.again(first))
    assert "certificate expired on 2" in late.permission.refusal
    assert late.permission.may_return, "with a renewed one"
    assert gate.again(late) is late
    assert gate.again(second).permission.forbids([3]) == ""


@pytest.mark.parametrize("line", ["3", "serial=xyz", "serial=", "afl:worker:x"])
def test_a_list_of_revoked_certificates_that_is_misspelt(line: str, ours: Identities, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text(f"serial=0A\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"server.tls.revoked .*revoked:2: a line is serial=HEX"):
        gate_of(tls={**tls(ours.server(), ours.ca), "revoked": str(revoked)})
    with pytest.raises(ConfigError, match=r"unless server.tls.client_ca is set"):
        gate_of(tls={**tls(ours.server()), "revoked": str(revoked)})
