"""The federation that a recording of a server leads to, event by event (docs/architecture.md)."""

from __future__ import annotations

import base64
import enum
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from afl.config import config_from_text
from afl.errors import ConfigError
from afl_server.federation import events
from afl_server.federation.effects import Compute
from afl_server.federation.evaluation_summary import Ranking
from afl_server.federation.machine import Federation
from afl_server.runner.build import build
from afl_server.runner.recording import FORMAT

_EVENTS = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, events.Event)
}


def replay_file(path: Path) -> Federation:
    """The federation that a recording leads to.

    Raises:
        ConfigError: if it is another version's, or of a server that resumed a run.
    """
    with path.open(encoding="utf-8") as lines:
        beginning = json.loads(next(lines))
        if beginning["format"] != FORMAT:
            raise ConfigError(
                f"{path}: a recording of format {beginning['format']}; this version of afl reads {FORMAT}"
            )
        if beginning["is_resumed"]:
            raise ConfigError(
                f"{path}: the server resumed a run; only a recording from a run's beginning can be replayed"
            )
        config = config_from_text(beginning["config"], f"the configuration in {path}")
        ranking = Ranking(
            config.divergence_watch, config.evaluation.ranking, block=config.algorithm.restart_length
        )
        federation, _ = build(config, beginning["run_id"], path.parent, ranking, beginning["began_at"])
        computed: deque[events.EngineDone] = deque()
        for now, event in _events(lines):
            if isinstance(event, events.EngineDone):
                event = computed.popleft()  # noqa: PLW2901  # what it was is not written
            wanted = federation.handle(event, now)
            computed.extend(_computed(effect) for effect in wanted if isinstance(effect, Compute))
    return federation


def _events(lines: Iterable[str]) -> Iterator[tuple[float, events.Event]]:
    """All but a last line that was cut off."""
    for line in lines:
        if line.endswith("\n"):
            values = json.loads(line)
            now, kind = values.pop("now"), _EVENTS[values.pop("event")]
            yield now, _value(kind, values)


def _computed(effect: Compute) -> events.EngineDone:
    try:
        return events.EngineDone(effect.call())
    except Exception as error:  # noqa: BLE001  # the federation's to judge, as it was
        return events.EngineDone(error=error)


def _value(hint: Any, plain: Any) -> Any:
    """The value of a type that JSON has ``plain`` of."""
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        inner = (kinds[0] for _ in plain) if kinds[-1] is Ellipsis else kinds
        return tuple(_value(kind, entry) for kind, entry in zip(inner, plain, strict=True))
    if hint is bytes or bytes in kinds:
        return base64.b64decode(plain)
    if not isinstance(hint, type):
        return plain
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _value(hints[name], entry) for name, entry in plain.items()})
    if issubclass(hint, tuple):
        return hint(*plain)
    return hint(plain) if issubclass(hint, enum.Enum) else plain
