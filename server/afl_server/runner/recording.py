"""A federation's events as JSON lines, and the federation that they lead to again: a fault to look at twice.

The first line describes the run; each line after it is an event with its time. Bytes are base64. What the
engine computed is not written: it is computed again.
"""

from __future__ import annotations

import base64
import enum
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import IO, Any, get_args, get_origin, get_type_hints

from afl.errors import ConfigError
from afl_server.federation import events
from afl_server.federation.effects import Compute, Effect
from afl_server.federation.machine import Federation

FORMAT = 2

_EVENTS = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, events.Event)
}
_NOT_WRITTEN = frozenset({"error", "result"})


@dataclass(frozen=True)
class Beginning:
    """What a federation was made of.

    Attributes:
        config: as YAML, with its seed.
        began_at: the time it was made at.
        is_resumed: whether it went on from a checkpoint, which is not part of a recording.
    """

    run_id: str
    config: str
    is_resumed: bool
    began_at: float
    format: int = FORMAT


class Recorder:
    """Writes events down as they come.

    Args:
        out: line by line, so that a server that is killed leaves all events that it has taken.
    """

    def __init__(self, out: IO[str], beginning: Beginning) -> None:
        self._out = out
        self._write(_plain(beginning))

    def add(self, event: events.Event, now: float) -> None:
        """An event that is about to be handled."""
        self._write({"event": type(event).__name__, "now": now, **_plain(event)})

    def _write(self, values: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(values, separators=(",", ":"), default=_plain) + "\n")

    def close(self) -> None:
        """Write no more."""
        self._out.close()


def read(lines: Iterable[str]) -> tuple[Beginning, Iterator[tuple[float, events.Event]]]:
    """What a :class:`Recorder` wrote; a last line that was cut off is left out.

    Raises:
        ConfigError: if it is another version's.
    """
    found = iter(lines)
    beginning: Beginning = _value(Beginning, json.loads(next(found)))
    if beginning.format != FORMAT:
        raise ConfigError(f"a recording of format {beginning.format}; this version of afl reads {FORMAT}")
    return beginning, _events(found)


def _events(lines: Iterator[str]) -> Iterator[tuple[float, events.Event]]:
    for line in lines:
        if line.endswith("\n"):
            values = json.loads(line)
            now, kind = values.pop("now"), _EVENTS[values.pop("event")]
            yield now, _value(kind, values)


def replay(federation: Federation, recorded: Iterable[tuple[float, events.Event]]) -> Iterator[list[Effect]]:
    """Take a federation, as it was made, through what was recorded; yields what each event sets in motion."""
    computed: deque[events.EngineDone] = deque()
    for now, event in recorded:
        wanted = federation.handle(computed.popleft() if isinstance(event, events.EngineDone) else event, now)
        computed.extend(_computed(effect) for effect in wanted if isinstance(effect, Compute))
        yield wanted


def _computed(effect: Compute) -> events.EngineDone:
    try:
        return events.EngineDone(effect.call())
    except Exception as error:  # noqa: BLE001  # the federation's to judge, as it was
        return events.EngineDone(error=error)


def _plain(value: Any) -> Any:
    """A dataclass or bytes as JSON has them; all else JSON knows by itself."""
    if is_dataclass(value):
        return {e.name: getattr(value, e.name) for e in fields(value) if e.name not in _NOT_WRITTEN}
    return base64.b64encode(value).decode()


def _value(hint: Any, plain: Any) -> Any:
    """The value of a type that :func:`_plain` made ``plain`` of."""
    kinds = get_args(hint)
    if hint is bytes or bytes in kinds:
        return base64.b64decode(plain)
    if get_origin(hint) is tuple:
        inner = (kinds[0] for _ in plain) if kinds[-1] is Ellipsis else kinds
        return tuple(_value(kind, entry) for kind, entry in zip(inner, plain, strict=True))
    if not isinstance(hint, type):
        return plain
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _value(hints[name], entry) for name, entry in plain.items()})
    if issubclass(hint, tuple):
        return hint(*plain)
    return hint(plain) if issubclass(hint, enum.Enum) else plain
