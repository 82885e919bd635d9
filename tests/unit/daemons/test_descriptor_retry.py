"""A file for which there is no descriptor is waited for; a disk that is full is not."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from afl.errors import StorageError
from afl.runs.durable import write_whole
from afl_server.storage import descriptor_retry
from afl_server.storage.descriptor_retry import retry_without_descriptor


@pytest.fixture
def no_descriptor(tmp_path: Path) -> Iterator[None]:
    """This process has none left; what is open stays open, the folder is there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def write(path: Path) -> str:
    try:
        write_whole(path, b"whole")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return "done"


def test_a_file_is_written_once_there_is_a_descriptor(
    no_descriptor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits = iter([False, False, True])

    def wait(seconds: float) -> None:
        if next(waits):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    monkeypatch.setattr(descriptor_retry.time, "sleep", wait)
    assert retry_without_descriptor(write, tmp_path / "file") == "done"
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert not list(waits)
    (record,) = caplog.records
    assert getattr(record, "event", "") == "descriptors_short", "said once"
    assert "Too many open files" in record.getMessage()


def test_a_model_whose_writer_has_an_error_of_its_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As safetensors says it."""
    tries = iter(["Error while serializing: I/O error: Too many open files (os error 24)"])

    def call() -> int:
        for said in tries:
            raise StorageError("model-final.safetensors cannot be written") from RuntimeError(said)
        return 1

    monkeypatch.setattr(descriptor_retry.time, "sleep", lambda seconds: None)
    assert retry_without_descriptor(call) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_broken_disk_is_not_waited_for(number: int) -> None:
    def call() -> None:
        raise StorageError("it cannot be written") from OSError(number, "broken")

    with pytest.raises(StorageError, match="it cannot be written"):
        retry_without_descriptor(call)
