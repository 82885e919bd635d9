"""OpenTelemetry traces of rounds, where this process's environment asks for them.

A trace is a round of a run, as its server and each worker saw it. Its ids follow from the run's id and the
round, which all of them know: nothing of it goes over the wire, and no server can have a worker send spans.
Each process sends its own to where its own environment says, with names, times and ids in them, and nothing
of data. The variables: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias, TypeVar

from afl._version import __version__
from afl.daemon import events
from afl.errors import ConfigError
from afl.optional_dependencies import require

LOG = logging.getLogger("afl.tracing")

ROUND: Final = "round"
"""The span that a trace begins with; the server's."""

CLOSE_S: Final = 1.0
"""A process that was asked to stop does not wait for a collector."""

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL_EXPORTERS: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}

Span: TypeAlias = tuple[float, float]
"""When something began and ended, in seconds of the monotonic clock."""

_T = TypeVar("_T")


class _Ids:
    """An id generator that says what it is told: the SDK's own would draw from the generator that a task's
    code may use."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        """The SDK's question, of a span without a parent."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """The SDK's question, of any span."""
        return self.span_id

    def is_trace_id_random(self) -> bool:
        """The SDK's question."""
        return False


class Tracing:
    """Makes spans of what is over, and has them exported by a thread of the SDK's; any thread may add.

    Args:
        api: the module ``opentelemetry.trace``.
        provider: whose ids come from ``ids``.
    """

    def __init__(self, api: Any, provider: Any, ids: _Ids) -> None:
        self._api = api
        self._provider = provider
        self._ids = ids
        self._guard = threading.Lock()
        self._tracer = provider.get_tracer("afl", __version__)

    def add(self, name: str, span: Span, *, run_id: str, round_: int, **attributes: str) -> None:
        """Add a span to a round's trace.

        Args:
            round_: the synchronization round.
        """
        api = self._api
        digest = hashlib.blake2b(f"{run_id}\n{round_}".encode(), digest_size=24).digest()
        trace_id, round_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
        parent = api.INVALID_SPAN
        if name != ROUND:
            # Whether a trace is sampled follows from its id, so that all processes decide alike.
            decision = self._provider.sampler.should_sample(None, trace_id, ROUND).decision
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if decision.is_sampled() else 0)
            parent = api.NonRecordingSpan(
                api.SpanContext(trace_id, round_id, is_remote=True, trace_flags=flags)
            )
        ahead = time.time() - time.monotonic()
        began, ended = (int((at + ahead) * 1e9) for at in span)
        found = {"afl.run_id": run_id, "afl.round": round_}
        found |= {f"afl.{key}": value for key, value in attributes.items()}
        with self._guard:
            self._ids.trace_id = trace_id
            self._ids.span_id = round_id if name == ROUND else secrets.randbits(64) or 1
            context = api.set_span_in_context(parent)
            made = self._tracer.start_span(name, context, attributes=found, start_time=began)
        made.end(ended)

    def close(self) -> None:
        """Export what is left, as far as that takes no longer than :data:`CLOSE_S`."""
        closing = threading.Thread(target=self._provider.shutdown, name="afl-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def timed(items: Iterable[_T], add: Callable[[Span], None]) -> Iterator[_T]:
    """The items; ``add`` is told the span from now until the last has been taken, or no more are."""
    began = time.monotonic()

    def taken() -> Iterator[_T]:
        try:
            yield from items
        finally:
            add((began, time.monotonic()))

    return taken()


def tracing(service: str, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """As the environment asks for it; ``None`` if it does not, or, with a warning, if it cannot be had.

    Args:
        service: the service's name, unless the environment names it.
    """
    asked = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or asked == "none":
        return None
    if not asked and not any(environment.get(name) for name in _ENDPOINTS):
        return None
    try:
        return _made(service, [name.strip() for name in (asked or "otlp").split(",")], environment)
    except Exception as error:  # noqa: BLE001  # such as an exporter's on a variable: the run does not need it
        LOG.warning("no traces (OTEL_...): %s", error, extra=events.TracesOff(reason=str(error)).extra)
        return None


def _made(service: str, names: Iterable[str], environment: Mapping[str, str]) -> Tracing:
    sdk = require("opentelemetry.sdk.trace", "send traces", "otel")
    export = require("opentelemetry.sdk.trace.export", "send traces", "otel")
    resources = require("opentelemetry.sdk.resources", "send traces", "otel")
    is_named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    own = {"service.version": __version__} | ({} if is_named else {"service.name": service})
    ids = _Ids()
    exporters = [_exporter(name, environment) for name in names]
    provider = sdk.TracerProvider(
        resource=resources.Resource.create(own), id_generator=ids, shutdown_on_exit=False
    )
    for exporter in exporters:
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return Tracing(require("opentelemetry.trace", "send traces", "otel"), provider, ids)


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    """An exporter by the name that the environment has for it."""
    if name == "otlp":
        protocol = next((environment[key] for key in _PROTOCOLS if environment.get(key)), "http/protobuf")
        name = _PROTOCOL_EXPORTERS.get(protocol, protocol)
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        raise ConfigError(f"no package with the exporter {name} is installed (OTEL_TRACES_EXPORTER)")
    return found.load()()
