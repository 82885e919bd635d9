"""Traces of rounds, as a collector gets them from a server and its workers."""

from __future__ import annotations

import datetime as dt
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from afl.daemon.tracing import CLOSE_S, tracing
from support import Federation

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-com", "rounds": 4, "eta_w": 0.9, "eta_q": 0.3},
    "evaluation": {"every": 2},
}


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP endpoint, and what it has got: the resource's service and the span, of each span."""
    found: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for group in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in group.resource.attributes}
                spans = [span for part in group.scope_spans for span in part.spans]
                found.extend((names["service.name"], span) for span in spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", found
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def run(folder: Path, environment: dict[str, str], of_site: dict[str, str]) -> bytes:
    """The final model of a run of two processes, the second with an environment of its own."""
    with Federation(CONFIG, folder, environment=environment) as federation:
        federation.start("0-1")
        federation.start("2", environment=of_site)
        federation.finish()
        return b"".join(federation.model_bytes().values())


def test_a_trace_shows_a_round_at_the_server_and_at_the_workers_of_sites_that_send(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", {}, {})
    with collector() as (endpoint, found), collector() as (own, at_site):
        on = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        elsewhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": own, "OTEL_SERVICE_NAME": "north"}
        assert run(tmp_path / "traced", on, elsewhere) == plain, "the run is as without traces"
    rounds = [span for _, span in found if span.name == "round"]
    assert [attributes(span)["afl.round"] for span in rounds] == [1, 2, 3, 4]
    assert all(not span.parent_span_id for span in rounds)
    assert len({span.trace_id for span in rounds}) == 4
    by_trace = {span.trace_id: span for span in rounds}
    for service, span in found + at_site:
        above = by_trace[span.trace_id]
        assert attributes(span)["afl.round"] == attributes(above)["afl.round"]
        assert span is above or span.parent_span_id == above.span_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if service != "afl-server":
            # One clock, up to its corrections.
            assert above.start_time_unix_nano - 5e8 < span.start_time_unix_nano

            assert span.end_time_unix_nano < above.end_time_unix_nano + 5e8
    for service, spans, ids in (("afl-worker", found, "0-1"), ("north", at_site, "2")):
        made = [span for name, span in spans if name == service]
        kinds = [(span.name, attributes(span)["afl.kind"]) for span in made]
        assert kinds.count(("compute", "train")) == 4
        assert kinds.count(("compute", "evaluate")) == 2
        assert ("send", "train") in kinds
        assert {attributes(span)["afl.ids"] for span in made} == {ids}
    server = [span.name for service, span in found if service == "afl-server"]
    assert server.count("step") == server.count("write outcome") == 6
    assert {service for service, _ in at_site} == {"north"}
    known = {"afl.run_id", "afl.round", "afl.kind", "afl.ids"}
    assert {key for _, span in found + at_site for key in attributes(span)} == known


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SERVICE_NAME": "north"},
    ],
)
def test_without_being_asked_for_there_are_none(environment: dict[str, str]) -> None:
    assert tracing("afl-worker", environment) is None


def test_an_exporter_that_is_not_there_is_told_and_the_run_does_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tracing("afl-worker", {"OTEL_TRACES_EXPORTER": "zipkin"}) is None
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert vars(line)["event"] == "traces_off"
    assert "zipkin" in line.getMessage()
    assert "OTEL_TRACES_EXPORTER" in vars(line)["reason"]


def test_a_collector_that_never_answers_keeps_no_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        on = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with Federation({**CONFIG, "workers": 1}, tmp_path, environment=on) as federation:
            federation.start("0")
            federation.finish()
            (over,) = federation.server.logged("run_over")
            assert time.time() - dt.datetime.fromisoformat(over["time"]).timestamp() < CLOSE_S + 5.0
