"""What can be named in a configuration's section ``algorithm``: the built-in ones, and users' own in an entry
point group."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint
from typing import Generic, Protocol, TypeVar

from afl.core.options import AlgorithmOption
from afl.errors import ConfigError


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def takes(self) -> frozenset[str]: ...

    @property
    def options(self) -> tuple[AlgorithmOption, ...]: ...


_T = TypeVar("_T", bound=_Named)


def entry_points(*, group: str) -> Sequence[EntryPoint]:
    """Those of a group, as ``importlib.metadata`` finds them.

    That reads a file of every installed package, 10 ms where there are a hundred, and one configuration asks
    several times; it is done again only once something has been installed or the path has changed.
    """
    return _entry_points(group, tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=32)
def _entry_points(group: str, _: tuple[tuple[str, int], ...]) -> Sequence[EntryPoint]:
    return tuple(metadata.entry_points(group=group))


def _changed(path: str) -> int:
    try:
        return os.stat(path or os.curdir).st_mtime_ns  # noqa: PTH116  # the core knows no pathlib
    except OSError:
        return 0


class Installed(Generic[_T]):
    """Those of one kind by name; nothing is loaded before it is asked for.

    Args:
        kind: the noun for messages.
        group: the entry point group of users' own.
        built_in: those that are always there.
        read: makes one of what an entry point loads; ``None`` where that is none.
        base: what it must be, for messages.
        shared: the options that ``takes`` may name.
        taken: the names that an option of its own may not have.
        needed_by: where it must be installed.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Iterable[_T],
        read: Callable[[object], _T | None],
        *,
        base: str,
        shared: frozenset[str],
        taken: frozenset[str],
        needed_by: str,
    ) -> None:
        self.built_in = {one.name: one for one in built_in}
        self._kind, self._group, self._read, self._base = kind, group, read, base
        self._shared, self._taken, self._needed_by = shared, taken, needed_by

    def names(self) -> tuple[str, ...]:
        """The built-in ones, then the others, ascending."""
        others = {point.name for point in entry_points(group=self._group)} - self.built_in.keys()
        return (*self.built_in, *sorted(others))

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in self.names()

    def named(self, name: str) -> _T:
        """The one of a name.

        Raises:
            ConfigError: if it is not installed, with the nearest name, or is no such thing.
        """
        if name in self.built_in:
            return self.built_in[name]
        for point in entry_points(group=self._group):
            if point.name == name:
                return self._checked(point)
        near = difflib.get_close_matches(name, self.names(), n=1)
        raise ConfigError(
            f"the {self._kind} {name!r} is not installed here: no entry point of that name is in the group "
            f"{self._group}"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f" Installed: {', '.join(self.names())}. Your own {self._kind} must be installed, as "
            f"`pip install` does it, in the environment of {self._needed_by}"
        )

    def _checked(self, point: EntryPoint) -> _T:
        where = f"the entry point {point.name!r} of {self._group}, {point.value},"
        try:
            found = self._read(point.load())
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{where} cannot be loaded: {error}") from error
        if found is None:
            raise ConfigError(f"{where} is no {self._base}")
        if found.name != point.name:
            raise ConfigError(
                f"{where} is {self._kind_with_article} that calls itself {found.name!r}; the names must be "
                "the same"
            )
        if unknown := sorted(found.takes - self._shared):
            raise ConfigError(
                f"{where} takes {unknown[0]!r}, which is none of {', '.join(sorted(self._shared))}; an "
                "option of its own belongs in `options`"
            )
        if taken := sorted({option.name for option in found.options} & self._taken):
            raise ConfigError(f"{where} calls an option of its own {taken[0]!r}, a name that is taken")
        return found

    @property
    def _kind_with_article(self) -> str:
        return f"{'an' if self._kind[0] in 'aeiou' else 'a'} {self._kind}"
