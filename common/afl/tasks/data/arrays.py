"""Arrays in files, of which a worker reads only its own rows: IDX (plain or gzip) and members of an npz.

Ten workers on one machine would otherwise hold ten copies of the whole data set at their start. The file
is read once from front to back, a few megabytes at a time, and the wanted rows are kept.
"""

from __future__ import annotations

import abc
import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from afl.errors import DataError

_BLOCK_BYTES = 4 << 20

_Opened: TypeAlias = tuple[IO[bytes], tuple[int, ...], "np.dtype[Any]"]
"""A stream that stands at the first row, the array's shape, and its element type."""


class StoredRows(abc.ABC):
    """An array in a file, read by rows (its first dimension).

    The second call of :meth:`take` reads and keeps the whole array: a process that hosts two workers
    often hosts many, and would unpack the file once for each.
    """

    _is_taken = False
    _kept: NDArray[Any] | None = None

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype

    @abc.abstractmethod
    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The given rows (ascending indices), shape ``[len(rows), *shape[1:]]``.

        Raises:
            afl.DataError: if the file is cut short or damaged.
        """

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """As :meth:`read`, from memory from the second call on."""
        if self._is_taken and self._kept is None:
            self._kept = self.whole()
        self._is_taken = True
        return self.read(rows) if self._kept is None else self._kept[rows]

    def whole(self) -> NDArray[Any]:
        """All rows, not kept."""
        return self.read(np.arange(self.shape[0], dtype=np.int64))


class StoredArray(StoredRows):
    """A member of an npz file (C order, no Python objects), or an IDX file of unsigned bytes.

    IDX is the format of MNIST and Fashion-MNIST, packed by gzip if the name ends so. Its header is two zero
    bytes, the element type (8: unsigned byte), the number of dimensions, and each dimension as a big-endian
    32-bit integer.

    Args:
        path: the file.
        member: the array's name in an npz file; empty for IDX.

    Raises:
        afl.DataError: if the file is of another format, or damaged, or has no such member.
    """

    def __init__(self, path: Path, member: str = "") -> None:
        self._opened = partial(_open_npz, path, member) if member else partial(_open_idx, path)
        with _undamaged(path), self._opened() as (_, shape, dtype):
            super().__init__(path, shape, dtype)

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The given rows."""
        row_shape = self.shape[1:]
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        kept = np.empty((len(rows), *row_shape), dtype=self.dtype)
        last = int(rows[-1]) + 1 if len(rows) else 0
        step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        with _undamaged(self.path), self._opened() as (stream, _, _):
            for start in range(0, last, step):
                count = min(step, last - start)
                block = stream.read(count * row_bytes)
                if len(block) != count * row_bytes:
                    ends = start + count
                    raise EOFError(f"{self.shape[0]} rows are announced, but it ends inside row {ends}")
                low, high = np.searchsorted(rows, [start, start + count])
                values = np.frombuffer(block, dtype=self.dtype).reshape(count, *row_shape)
                kept[low:high] = values[rows[low:high] - start]
        return kept


def npz_names(path: Path) -> list[str]:
    """The names of an npz file's arrays.

    Raises:
        afl.DataError: if it is damaged.
    """
    with _undamaged(path), zipfile.ZipFile(path) as archive:
        return [member.removesuffix(".npy") for member in archive.namelist()]


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is damaged: {error}; fetch it again") from error


@contextmanager
def _open_idx(path: Path) -> Iterator[_Opened]:
    with cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as stream:
        magic = stream.read(4)
        if len(magic) != 4 or magic[:3] != b"\x00\x00\x08" or magic[3] == 0:
            raise DataError(f"{path} is not an IDX file of unsigned bytes: it starts with {magic!r}")
        sizes = stream.read(4 * magic[3])
        if len(sizes) != 4 * magic[3]:
            raise EOFError("it ends inside its header")
        yield stream, tuple(np.frombuffer(sizes, dtype=">u4").tolist()), np.dtype(np.uint8)


@contextmanager
def _open_npz(path: Path, name: str) -> Iterator[_Opened]:
    if name not in (names := npz_names(path)):
        raise DataError(f"{path} has no array {name}; it holds {', '.join(names)}")
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        try:
            is_first = np.lib.format.read_magic(stream) == (1, 0)
            header = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = header(stream)
        except ValueError as error:
            raise DataError(f"{path}: {name} is not an array as numpy.savez writes it: {error}") from error
        if is_fortran or dtype.hasobject or not shape:
            raise DataError(f"{path}: the array {name} must have rows in C order and no Python objects")
        yield stream, shape, dtype
