"""Shared randomness: every random choice of a run as a pure function of (seed, purpose, round, worker).

The generator is Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). Only its raw 64-bit output is used, which numpy promises never to change; what is drawn from it
(integers below a bound, subsets) is defined here, word by word, so that any implementation of Philox in
any language gives the same choices.

One stream: the key is the run's 128-bit seed; the 256-bit counter starts at
``(0, purpose, round, worker)``, lowest word first, and counts up in the lowest word. The first output
block is that of counter ``(1, purpose, round, worker)``, as in numpy. Two streams that differ in purpose,
round or worker therefore never share a block.
"""

from __future__ import annotations

import enum
import itertools
import math
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

SEED_BYTES = 16


class Purpose(enum.IntEnum):
    """What a stream is for. The numbers are part of the protocol: never reuse or change one."""

    COMPRESSOR = 1
    RANDOM_OUTPUT = 2
    SNAPSHOT = 3
    MINIBATCH = 4
    INITIALIZATION = 5
    PARTITION = 6
    SYNTHETIC_DATA = 7
    TRAIN_TEST_SPLIT = 8
    MODEL_SAMPLING = 9
    LOSS_SAMPLING = 10
    LOSS_MINIBATCH = 11
    DOWNLINK_COMPRESSOR = 12
    VALIDATION_SPLIT = 13
    TASK_IN_GRADIENT = 14
    TASK_IN_LOSS = 15
    TASK_IN_EVALUATION = 16
    HELD_OUT_SPLIT = 17
    AUGMENTATION = 18


_NO_WORDS = np.zeros(4, dtype=np.uint64)


class _Unused(ISeedSequence):
    """The seed that numpy wants of a generator whose state is set at once; a real one takes 9 us."""

    def generate_state(
        self,
        n_words: int,
        dtype: Any = np.uint32,  # noqa: ARG002
    ) -> NDArray[np.uint64]:
        return _NO_WORDS[:n_words]


_UNUSED = _Unused()

_SHORT = 512
"""Up to so many candidates, a minibatch's, Python's own set of them is faster than sorting (measured)."""

_MARKED = 32
"""From a 32nd of the population on, marking what was drawn is faster than sorting it (measured)."""

_BLOCK = 1 << 15
"""So many candidates at a time stay in a second-level cache; even, since a word gives two."""


class Stream:
    """One stream of uniform 64-bit words and what is drawn from it."""

    def __init__(self, seed: bytes, purpose: int, round_: int, worker: int) -> None:
        # Philox(key=..., counter=...) would ask the operating system for a seed that it does not use.
        self._philox = np.random.Philox(_UNUSED)  # type: ignore[arg-type]  # its stubs forget the interface
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([0, purpose, round_, worker], dtype=np.uint64),
                "key": np.frombuffer(seed, dtype="<u8").astype(np.uint64, copy=False),
            },
            "buffer": _NO_WORDS,
            "buffer_pos": len(_NO_WORDS),
            "has_uint32": 0,
            "uinteger": 0,
        }

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words; shape ``[count]``, uint64."""
        raw: NDArray[np.uint64] = self._philox.random_raw(count)
        return raw

    def integer(self, bound: int) -> int:
        """A uniform integer in ``[0, bound)``, exactly uniform (rejection, no modulo bias).

        Each try takes one word and keeps its highest ``ceil(log2 bound)`` bits.
        """
        assert bound >= 1
        bits = (bound - 1).bit_length()
        while True:
            value = int(self.words(1)[0]) >> (64 - bits)
            if value < bound:
                return value

    def uniform(self, count: int) -> NDArray[np.float64]:
        """``count`` doubles in ``[0, 1)``: each word's highest 53 bits times 2^-53."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def permutation(self, count: int) -> NDArray[np.int64]:
        """A uniform permutation of ``0..count-1``: the stable order of ``count`` words, int64.

        Two equal words (probability below ``count^2 / 2^65``) would keep their order.
        """
        return np.argsort(self.words(count), kind="stable").astype(np.int64)

    def subset(self, population: int, size: int) -> NDArray[np.int64]:
        """A subset of ``0..population-1``, uniform over all subsets of ``size``; ascending, int64 ``[size]``.

        It is the set of the first ``size`` *distinct* values of an independent uniform sequence
        (:meth:`_candidates`), which is exactly uniform by symmetry. Above one half the complement is
        drawn instead, from the same sequence.

        Raises:
            ValueError: if not ``0 <= size <= population``.
        """
        if not 0 <= size <= population:
            raise ValueError(f"a subset of {size} from {population} does not exist")
        if 2 * size > population:
            return np.flatnonzero(~self._marked(population, population - size))
        if size == 0:
            return np.zeros(0, dtype=np.int64)
        length = _first_pass(population, size)
        if length > _SHORT and length * _MARKED > population:
            return _marked_places(self._marked(population, size), size)
        values: NDArray[np.unsignedinteger] = np.zeros(0, dtype=np.uint32)
        while len(values) < size:
            missing = size - len(values)
            sequence = self._candidates(population, length)
            is_short = length <= _SHORT and not len(values)
            fresh = _first_distinct(sequence, missing) if is_short else _distinct(sequence)
            if len(values):
                fresh = fresh[~_is_in_sorted(fresh, values)]
            if len(fresh) > missing:
                fresh = _earliest(sequence, fresh, missing)
            values = np.insert(values, np.searchsorted(values, fresh), fresh) if len(values) else fresh
            length = 2 * (size - len(values)) + 16
        return values.astype(np.int64)

    def _marked(self, population: int, size: int) -> NDArray[np.bool_]:
        """The same subset as a mark for each of ``0..population-1``."""
        marks = np.zeros(population, dtype=np.bool_)
        found, length = 0, _first_pass(population, size)
        while found < size:
            drawn = []
            for start in range(0, length, _BLOCK):
                fresh = self._candidates(population, min(_BLOCK, length - start)).astype(np.int64)
                if found:
                    fresh = fresh[~marks[fresh]]
                marks[fresh] = True
                drawn.append(fresh)
            before, found = found, int(np.count_nonzero(marks))
            if found > size:
                fresh = np.concatenate(drawn)
                marks[fresh] = False
                first = np.sort(np.unique(fresh, return_index=True)[1])
                marks[fresh[first[: size - before]]] = True
                found = size
            length = 2 * (size - found) + 16
        return marks

    def _candidates(self, population: int, count: int) -> NDArray[np.unsignedinteger]:
        """The next values, in order, of a sequence uniform in ``[0, population)``; at most ``count + 1``.

        Up to 2^32: a candidate ``u`` is half a word, low half first (whole words are read); its value is
        the high half of ``u * population``, and it is rejected if the low half is below
        ``2^32 mod population`` (Lemire, "Fast random integer generation in an interval", 2019). Beyond:
        a candidate is a word's highest ``ceil(log2 population)`` bits, rejected unless below the bound.
        """
        if population > 1 << 32:
            wide = self.words(count) >> np.uint64(64 - (population - 1).bit_length())
            return wide[wide < population]
        halves = self.words((count + 1) // 2).astype("<u8", copy=False).view("<u4")
        # The type is named: numpy 1 would keep the halves' own and overflow.
        product: NDArray[np.uint64] = np.multiply(halves, np.uint64(population), dtype=np.uint64)
        parts = product.astype("<u8", copy=False).view("<u4")
        low, value = parts[0::2], parts[1::2]
        threshold = (1 << 32) % population
        if threshold and low.min() < threshold:
            value = value[low >= threshold]
        return value


def _first_pass(population: int, size: int) -> int:
    """How many candidates to draw at first: nearly as many as give ``size`` distinct ones (four standard
    deviations fewer), since few that are missing are quickly drawn and one too many is costly to find.

    Only the speed depends on it: passes follow each other in one sequence.
    """
    collisions = -population * math.log1p(-size / population) - size
    return max(int(size + collisions - 4 * math.sqrt(max(collisions, 0.0))), 2 * min(size, 64) + 16)


def _marked_places(marks: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Where the ``count`` marks are, ascending.

    numpy looks for marks one by one where they are up to a tenth, and beyond it goes without branches, three
    times as fast (measured): some more behind each block make them as many.
    """
    places: NDArray[np.int64] = np.empty(count, dtype=np.int64)
    padded, found = np.ones(_BLOCK + _BLOCK // 8, dtype=np.bool_), 0
    for start in range(0, len(marks), _BLOCK):
        block = marks[start : start + _BLOCK]
        padded[: len(block)] = block
        own = int(np.count_nonzero(block))
        np.add(np.flatnonzero(padded)[:own], start, out=places[found : found + own])
        found += own
    return places


def _distinct(values: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """The distinct values, ascending."""
    ordered = np.sort(values)
    if len(ordered) < 2:
        return ordered
    is_first = np.empty(len(ordered), dtype=np.bool_)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def _first_distinct(sequence: NDArray[np.unsignedinteger], count: int) -> NDArray[np.unsignedinteger]:
    """The first ``count`` distinct values, or all where there are fewer; ascending."""
    first = itertools.islice(dict.fromkeys(sequence.tolist()), count)
    return np.array(sorted(first), dtype=sequence.dtype)


def _earliest(
    sequence: NDArray[np.unsignedinteger], values: NDArray[np.unsignedinteger], count: int
) -> NDArray[np.unsignedinteger]:
    """Those ``count`` of the ascending ``values`` that occur first in ``sequence``, ascending."""
    among = sequence[_is_in_sorted(sequence, values)]
    first = np.unique(among, return_index=True)[1]
    return np.sort(among[np.sort(first)[:count]])


def _is_in_sorted(
    values: NDArray[np.unsignedinteger], table: NDArray[np.unsignedinteger]
) -> NDArray[np.bool_]:
    """Which of ``values`` occur in the ascending ``table``."""
    if not len(table):
        return np.zeros(len(values), dtype=np.bool_)
    position = np.searchsorted(table, values)
    position[position == len(table)] = 0
    found: NDArray[np.bool_] = table[position] == values
    return found


@dataclass(frozen=True)
class SharedRandomness:
    """The run's seed and the streams made from it.

    Attributes:
        seed: 16 bytes, the Philox key in little-endian order.
    """

    seed: bytes

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES:
            raise ValueError(f"the seed is {len(self.seed)} bytes long; it has {SEED_BYTES} (128 bits)")

    @classmethod
    def from_int(cls, seed: int) -> SharedRandomness:
        """The randomness of an integer seed, ``0 <= seed < 2^128``."""
        return cls(seed.to_bytes(SEED_BYTES, "little"))

    @classmethod
    def fresh(cls) -> SharedRandomness:
        """A new seed from the operating system, for a run whose configuration names none."""
        return cls(secrets.token_bytes(SEED_BYTES))

    def stream(self, purpose: Purpose, round_: int = 0, worker: int = 0) -> Stream:
        """The stream for one purpose, 1-based round and worker id."""
        return Stream(self.seed, purpose, round_, worker)
