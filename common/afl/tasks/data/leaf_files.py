"""The layouts in which FEMNIST is found on disk: LEAF's json, parquet with a writer column, npz.

Each is made an :class:`afl.tasks.data.images.ImageSource` that knows each row's writer. Images are either
uint8, 0 to 255, or float32, 0 to 1, ``[n, 28, 28]``.
"""

from __future__ import annotations

import io
import json
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.errors import DataError
from afl.optional_dependencies import require
from afl.paths import kind_of
from afl.tasks.data.arrays import StoredArray
from afl.tasks.data.images import ImageSource, Pixels, decoded, labelled, stored
from afl.tasks.data.partitions import Indices

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The 62 classes in LEAF's order."""

_SIDE = 28

_OBJECT = re.compile(rb'("[^",:\[\]{}]*")\s*:\s*\{')
"""A key and an object's brace. A writer's name has no punctuation, so the search never runs from a closing
quote through an image."""


def find_layout(place: Path) -> ImageSource | None:
    """The data at ``place``, or None where nothing is.

    ``place`` is an npz, parquet or json file, or a folder that holds them directly or in LEAF's
    ``data/all_data``, ``all_data``, or ``train`` and ``test`` (which are joined) below it or its ``data``.

    Raises:
        afl.DataError: if a file is there but is not of its layout.
    """
    if kind_of(place) == "file":
        return _opened([place])
    for folders in (["."], ["data/all_data"], ["all_data"], ["data/train", "data/test"], ["train", "test"]):
        for suffix in (".npz", ".parquet", ".json"):
            files = [file for folder in folders for file in sorted((place / folder).glob(f"*{suffix}"))]
            if files:
                return _opened(files)
    return None


def _opened(files: Sequence[Path]) -> ImageSource:
    suffix = files[0].suffix
    if suffix == ".json":
        leaf = LeafJson(files)
        return ImageSource(len(leaf.writers), leaf.labels, leaf.images, leaf.writers)
    if suffix == ".parquet":
        return _parquet_source(files)
    if suffix != ".npz" or len(files) > 1:
        raise DataError(
            f"{', '.join(map(str, files))}: FEMNIST is read from one npz, from parquet or from json"
        )
    return _npz_source(files[0])


def _npz_source(path: Path) -> ImageSource:
    """An npz with ``images`` (uint8 ``[n, 28, 28]``), ``labels`` and ``writer`` (names or numbers)."""
    images, labels, writer = (StoredArray(path, name) for name in ("images", "labels", "writer"))
    if labels.shape[0] != writer.shape[0]:
        raise DataError(f"{path}: {labels.shape[0]} labels, but {writer.shape[0]} writers")
    return stored(images, labels, (_SIDE, _SIDE), writer.whole().astype(np.str_))


class LeafJson:
    """LEAF's files: ``users``, ``num_samples`` and ``user_data: {user: {x: [784 floats, ...], y: [...]}}``.

    A file of a hundred writers has hundreds of megabytes of text and several times that as Python objects.
    So the files are mapped, and only the asked writers' part of the text is parsed.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._spans: list[tuple[Path, str]] = []
        self._objects: dict[Path, dict[bytes, int]] = {}
        counts: list[int] = []
        for path in files:
            with _mapped(path) as text:
                users, samples = (_list_after(text, path, key) for key in ("users", "num_samples"))
            if len(users) != len(samples):
                raise DataError(f"{path}: {len(users)} users but {len(samples)} num_samples")
            self._spans += [(path, str(user)) for user in users]
            counts += samples
        self._starts = np.cumsum([0, *counts])
        self.writers = np.repeat(np.array([user for _, user in self._spans], np.str_), counts)

    def labels(self, rows: Indices) -> Indices:
        """The labels of ``rows``, int64."""
        parts = (part[places] for part, places in self._parts(rows, "y"))
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def images(self, rows: Indices) -> NDArray[np.float32]:
        """float32, as stored: 0 is black, 1 is white."""
        parts = (part[places].reshape(-1, _SIDE, _SIDE) for part, places in self._parts(rows, "x"))
        return np.concatenate([np.zeros((0, _SIDE, _SIDE), np.float32), *parts])

    def _parts(self, rows: Indices, key: str) -> Iterator[tuple[NDArray[Any], Indices]]:
        """For each writer among ``rows``: the writer's array under ``key``, and the places asked for."""
        spans = np.searchsorted(self._starts, rows, side="right") - 1
        for span in np.unique(spans).tolist():
            path, user = self._spans[span]
            start, end = self._starts[span], self._starts[span + 1]
            yield self._read(path, user, key, int(end - start)), rows[spans == span] - start

    def _read(self, path: Path, user: str, key: str, count: int) -> NDArray[Any]:
        shape = (count, _SIDE * _SIDE) if key == "x" else (count,)
        with _mapped(path) as text:
            if path not in self._objects:
                first = _after(text, path, "user_data", 0, bracket=b"{")
                self._objects[path] = {match[1]: match.end() for match in _OBJECT.finditer(text, first)}
            start = self._objects[path].get(json.dumps(user).encode())
            if start is None:
                raise DataError(f"{path} is not in LEAF's layout: no user_data of user {user}")
            # No brace can occur inside: x and y hold numbers only.
            stop = text.find(b"}", start)
            if key == "y":
                # Without parsing the images, a hundred times as long, where all labels are asked for.
                first = _after(text, path, key, start, bracket=b"[", stop=stop)
                part = b'{"y": ' + text[first - 1 : text.find(b"]", first) + 1] + b"}"
            else:
                part = text[start - 1 : stop + 1]
        try:
            values = np.array(json.loads(part).get(key), dtype=np.float32 if key == "x" else np.int64)
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: {key} of user {user} is not a list of numbers: {error}") from error
        if values.shape != shape:
            raise DataError(f"{path}: {key} of user {user} has shape {values.shape}; {shape} is needed")
        return values


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            yield text


def _after(text: mmap.mmap, path: Path, key: str, start: int, *, bracket: bytes, stop: int = 0) -> int:
    """The position behind ``"key": <bracket>``, the first one from ``start`` on."""
    pattern = re.escape(json.dumps(key).encode()) + rb"\s*:\s*" + re.escape(bracket)
    match = re.compile(pattern).search(text, start, stop or len(text))
    if match is None:
        raise DataError(f"{path} is not in LEAF's layout: no {key!r} followed by {bracket.decode()}")
    return match.end()


def _list_after(text: mmap.mmap, path: Path, key: str) -> Any:
    start = _after(text, path, key, 0, bracket=b"[")
    try:
        return json.loads(text[start - 1 : text.find(b"]", start) + 1])
    except ValueError as error:
        raise DataError(f"{path} is not in LEAF's layout: {key} is not a list: {error}") from error


def _parquet_source(paths: Sequence[Path]) -> ImageSource:
    """Parquet files with a writer column, as the Hugging Face hub's copies of FEMNIST have.

    Columns: ``writer_id`` (or ``writer``); ``character`` (or ``label``), a number or the character itself;
    ``image``, an encoded image (bytes, or a struct with ``bytes``) or 784 numbers: integers from 0 to 255,
    or floats from 0 to 1.
    """
    arrow, parquet = (require(name, "read parquet files") for name in ("pyarrow", "pyarrow.parquet"))
    files = [(path, parquet.ParquetFile(path)) for path in paths]
    writers: list[str] = []
    labels: list[int] = []
    for path, file in files:
        names = file.schema_arrow.names
        writer = _column(path, names, "writer_id", "writer")
        label = _column(path, names, "character", "label")
        _column(path, names, "image")
        table = file.read(columns=[writer, label])
        writers += map(str, table.column(writer).to_pylist())
        labels += [_class_number(path, value) for value in table.column(label).to_pylist()]

    def images(rows: Indices) -> Pixels:
        """Only the row groups that hold one of ``rows`` are read."""
        kept: list[NDArray[Any]] = []
        start = 0
        for path, file in files:
            for group in range(file.num_row_groups):
                end = start + file.metadata.row_group(group).num_rows
                inside = rows[(rows >= start) & (rows < end)] - start
                if len(inside):
                    column = file.read_row_group(group, columns=["image"]).column("image")
                    kept += [_pixels(path, value) for value in column.take(arrow.array(inside)).to_pylist()]
                start = end
        return np.stack(kept)

    return labelled(np.array(labels, dtype=np.int64), images, np.array(writers, dtype=np.str_))


def _column(path: Path, names: Sequence[str], *accepted: str) -> str:
    found = [name for name in accepted if name in names]
    if not found:
        raise DataError(f"{path} has no column {' or '.join(accepted)}; it has {', '.join(names)}")
    return found[0]


def _class_number(path: Path, value: object) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, str) and len(value) == 1 and value in CHARACTERS:
        return CHARACTERS.index(value)
    raise DataError(f"{path}: the label {value!r} is neither a number nor one of {CHARACTERS}")


def _pixels(path: Path, value: Any) -> Pixels:
    content = value["bytes"] if isinstance(value, dict) else value
    pixels: NDArray[Any]
    if isinstance(content, bytes):
        pixels = decoded(io.BytesIO(content), f"{path} holds an image that cannot be read", "L")
    else:
        numbers = np.asarray(content)
        pixels = numbers.astype(np.uint8 if numbers.dtype.kind in "iu" else np.float32)
    if pixels.size != _SIDE * _SIDE:
        raise DataError(f"{path} holds an image of {pixels.size} pixels; FEMNIST's have {_SIDE} x {_SIDE}")
    return pixels.reshape(_SIDE, _SIDE)
