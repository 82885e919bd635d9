"""Metrics for Prometheus: a table of what they mean, and values that are computed when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from afl.daemon.http import Answer, Environ


class Family(NamedTuple):
    """What is said of a metric; it is a counter if its name ends with ``_total``."""

    meaning: str
    labels: Sequence[str]


# Of a metric without labels, by worker, or by the values of its labels; `None` where it has none.
Value: TypeAlias = float | Sequence[float] | Mapping[tuple[str, ...], float] | None


def families(meanings: Mapping[str, str]) -> Mapping[str, Family]:
    """The families by name, from meanings by what is written as ``name{label,label}``."""
    written = ((name.rstrip("}").partition("{"), meaning) for name, meaning in meanings.items())
    return {
        name: Family(meaning, labels.split(",") if labels else ()) for (name, _, labels), meaning in written
    }


@dataclass(frozen=True, eq=False)  # the registry keeps it by its identity
class _Collector(Collector):
    families: Mapping[str, Family]
    values: Callable[[], Mapping[str, Value]]

    def collect(self) -> Iterable[Metric]:
        """The present state."""
        for name, value in self.values().items():
            if value is None:
                continue
            family = self.families[name]
            make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = make(name, family.meaning, labels=family.labels)
            if isinstance(value, Mapping):
                samples = value
            elif isinstance(value, Sequence):
                samples = {(str(worker),): number for worker, number in enumerate(value)}
            else:
                samples = {(): value}
            for labels, number in samples.items():
                metric.add_metric(labels, number)
            yield metric


def registry_of(
    families: Mapping[str, Family], values: Callable[[], Mapping[str, Value]]
) -> CollectorRegistry:
    """Metrics by what ``values`` says at each scrape, and the process's own as the client has them."""
    registry = CollectorRegistry()
    registry.register(_Collector(families, values))
    ProcessCollector(registry=registry)
    return registry


def scraped(registry: CollectorRegistry, environ: Environ) -> Answer:
    """The page, in the format that the scraper asks for."""
    encode, kind = choose_encoder(environ.get("HTTP_ACCEPT", ""))
    return Answer("200 OK", kind, encode(registry))
