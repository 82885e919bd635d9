"""A configuration as text again: as YAML, and as a digest of what defines the result."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import yaml
from pydantic import BaseModel

from afl.config.schema import Config
from afl.config.source import AMBIGUOUS_WORDS, resolve_plain

_DIGEST_VERSION: Final = 1
"""Part of what is hashed: raise it when the digest's input changes its form."""

_DEFAULT_WORDS: Final = frozenset({"training", "uniform", "last"})

_STEPPING: Final = frozenset({"schedule", "optimizer", "weight_decay", "clip_norm"})
"""Keys that count as :attr:`afl.config.schema.Algorithm.stepping` has them."""


def dump_config(config: Config, *, only_given: bool = False) -> str:
    """The configuration as YAML with its defaults written out, or only what was given; loading it gives back
    an equal one."""
    values = _plain(config, config.model_dump(mode="json", exclude_unset=only_given))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def config_digest(config: Config) -> str:
    """64 hexadecimal digits over what defines the result: workers, task, algorithm, seed and worker threads.

    Two ways to write the same thing (``block: auto`` and its value, a downlink that repeats the uplink) have
    the same digest. Step sizes count as written: those of the theory hold a logarithm, whose last bit
    depends on the machine's mathematical library.
    """
    algorithm = config.algorithm
    # Keys that came later count only where they are not at their defaults.
    names = (
        *("dual_loss", "final_model", "largest_weight", "local_steps", "sampled", "server_eta"),
        "weighting",
    )
    later = {name: getattr(algorithm, name) for name in names}
    records = config.privacy.records
    unnoised = {"metrics", "metric_noise"} if records and records.metrics == "full" else set()
    defining = {
        "version": _DIGEST_VERSION,
        "workers": config.workers,
        "task": config.task.model_dump(mode="json", exclude=set() if config.task.held_out else {"held_out"}),
        "algorithm": {
            **algorithm.model_dump(
                mode="json", exclude={"block", "dual", "uplink", "downlink", *later, *_STEPPING}
            ),
            **{key: value for key, value in later.items() if value not in {None, 1, *_DEFAULT_WORDS}},
            **({"dual": algorithm.dual_section} if algorithm.dual_section else {}),
            **algorithm.stepping,
            **algorithm.own,
            "block": algorithm.block_length,
            "uplink": algorithm.uplink_compressor.model_dump(mode="json"),
            "downlink": algorithm.downlink_compressor.model_dump(mode="json"),
        },
        "seed": config.run.seed,
        "threads": config.worker.threads,
        **({"batch_oracles": True} if config.worker.batch_oracles else {}),
        **({"records": records.model_dump(exclude=unnoised)} if records else {}),
    }
    text = json.dumps(defining, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(model: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    """The dumped ``values`` of ``model`` without what is null by default, text escaped."""
    plain = {}
    for name, value in values.items():
        field = type(model).model_fields.get(name)
        if value is None and field is not None and field.default is None:
            continue
        inner = getattr(model, name)
        plain[name] = _plain(inner, value) if isinstance(inner, BaseModel) else _escaped(value)
    return plain


def _escaped(value: Any) -> Any:
    """The value with what the reader would fill in from the environment escaped; keys it leaves alone."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader, whose scalars are YAML 1.2's, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # the base class's signature
        """Write a value that occurs twice out twice."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_typed = not isinstance(resolve_plain(text), str) or text.lower() in AMBIGUOUS_WORDS
    # YAML folds Unicode's line breaks into spaces unless they are escaped.
    needs_quotes = is_typed or not set("\x85\u2028\u2029").isdisjoint(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if needs_quotes else None)


_Dumper.add_representer(str, _text)
