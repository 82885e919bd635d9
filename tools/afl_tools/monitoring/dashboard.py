"""The Grafana dashboard of a federation, as code: deploy/grafana/afl.json is made from it.

A row is a list of panels, a panel a title with queries. Queries are of one server, which the dashboard's
variables choose: a data source, and a run on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models

FILE = Path(__file__).resolve().parents[3] / "deploy" / "grafana" / "afl.json"

SERVER: Final = 'job="$job",instance="$instance"'
"""What the chosen server's series have in common."""

_WIDTH: Final = 24
_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="$source")


@dataclass(frozen=True)
class Query:
    """An expression, and how its series are named."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        queries: its series, or a stat's one value.
        unit: Grafana's name of it.
        is_stat: a number instead of a graph.
        is_stepped: the values stay until they change.
        shows_name: a stat shows its series' name instead of its value.
        bars: the series that is drawn as bars, with an axis of its own.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 12
    is_stat: bool = False
    is_stepped: bool = False
    shows_name: bool = False
    bars: str = ""


def of(metric: str, *labels: str) -> str:
    """A metric of the chosen server."""
    return f"{metric}{{{','.join([SERVER, *labels])}}}"


def rate(metric: str, *labels: str) -> str:
    """A counter's rate, a second."""
    return f"rate({of(metric, *labels)}[$__rate_interval])"


def increase(metric: str, *labels: str) -> str:
    """A counter's increase within an interval of the graph."""
    return f"increase({of(metric, *labels)}[$__rate_interval])"


def number(
    title: str,
    description: str,
    query: str,
    *,
    unit: str = "short",
    legend: str = "",
    shows_name: bool = False,
) -> Panel:
    """A panel with one number, or with the name of the one series that there is."""
    return Panel(
        title, description, [Query(query, legend)], unit, width=4, is_stat=True, shows_name=shows_name
    )


GLANCE: Final = [
    number(
        "State", "What the run is doing.", f"{of('afl_run_state')} == 1", legend="{{state}}", shows_name=True
    ),
    number("Round", "The open update round.", of("afl_round")),
    number("Rounds in all", "T, the update rounds of the run.", of("afl_rounds")),
    number(
        "Rounds a second",
        "Over the last minutes.",
        f"clamp_min(deriv({of('afl_round')}[$__rate_interval]), 0)",
    ),
    number(
        "Worst worker",
        "The worker of the highest test loss at the last evaluation.",
        f"topk(1, {of('afl_worker_loss')})",
        legend="worker {{worker}}",
        shows_name=True,
    ),
    number("Its test loss", "At the last evaluation.", of("afl_max_worker_loss")),
    number(
        "Worst accuracy",
        "The lowest test accuracy of any worker at the last evaluation, where the task has one.",
        of("afl_worst_worker_accuracy"),
        unit="percentunit",
    ),
    number(
        "Best so far",
        "The highest worst-worker accuracy of all evaluations; model-best is of that one.",
        of("afl_best_worst_worker_accuracy"),
        unit="percentunit",
    ),
    number("Workers ready", "Workers with a session that is ready.", of("afl_workers_ready")),
    number("Workers in all", "m, the workers of the run.", of("afl_workers")),
    number("Step open for", "How long the open step has been open.", of("afl_open_step_seconds"), unit="s"),
    number(
        "Awaited",
        "Workers whose report the open step waits for.",
        of("afl_workers_missing_reports"),
    ),
]

LEARNING: Final = [
    Panel(
        "Minibatch loss by worker",
        "In the last closed round.",
        [Query(of("afl_train_loss"), "worker {{worker}}")],
    ),
    Panel(
        "Test loss by worker",
        "At the last evaluation.",
        [Query(of("afl_worker_loss"), "worker {{worker}}")],
        is_stepped=True,
    ),
    Panel(
        "Test accuracy by worker",
        "At the last evaluation, where the task has one.",
        [Query(of("afl_worker_accuracy"), "worker {{worker}}")],
        unit="percentunit",
        is_stepped=True,
    ),
    Panel(
        "Residuals",
        "What is yet to be sent, at the last evaluation: Euclidean norms, of each worker and of the server.",
        [
            Query(of("afl_uplink_residual_norm"), "worker {{worker}}"),
            Query(of("afl_downlink_residual_norm"), "server"),
        ],
        is_stepped=True,
    ),
]

DUAL: Final = [
    Panel(
        "Dual weights",
        "q, by worker, and restarts to uniform weights as bars.",
        [
            Query(of("afl_dual_weight"), "worker {{worker}}"),
            Query(increase("afl_dual_restarts_total"), "restarts"),
        ],
        width=24,
        bars="restarts",
    ),
]

TRAFFIC: Final = [
    Panel(
        "Bytes a second by direction and kind",
        "gRPC messages with their prefixes.",
        [Query(rate("afl_wire_bytes_total"), "{{direction}} {{kind}}")],
        unit="Bps",
    ),
    Panel(
        "Bytes a second by part",
        "The same bytes by what they are.",
        [Query(rate("afl_payload_bytes_total"), "{{direction}} {{part}}")],
        unit="Bps",
    ),
    Panel(
        "Bytes a round",
        "What an update round costs, both ways.",
        [
            Query(
                f"sum by (direction) ({rate('afl_wire_bytes_total')}) / ignoring (direction) group_left () "
                f"(sum(deriv({of('afl_round')}[$__rate_interval])) > 0)",
                "{{direction}}",
            )
        ],
        unit="bytes",
    ),
    Panel(
        "Compression",
        "Floats that the paper's accounting charges, times four, and bytes on the wire; in all.",
        [
            Query(f"4 * {of('afl_float_equivalents_total')}", "{{direction}}, charged"),
            Query(f"sum by (direction) ({of('afl_wire_bytes_total')})", "{{direction}}, on the wire"),
        ],
        unit="bytes",
    ),
]

TIME: Final = [
    Panel(
        "A round's phases",
        "How long the last step of each kind was open, and how long it took to make its outcome durable.",
        [Query(of("afl_step_seconds"), "{{kind}}"), Query(of("afl_outcome_seconds"), "to the disk")],
        unit="s",
    ),
    Panel(
        "Seconds a round",
        "Of the last closed round.",
        [Query(of("afl_round_seconds"), "round")],
        unit="s",
    ),
    Panel(
        "Reports by worker",
        "How long after a step was opened each worker's report was complete: who is slow.",
        [Query(of("afl_report_seconds"), "worker {{worker}}")],
        unit="s",
    ),
    Panel(
        "Awaited by the open step",
        "The share of the time that the run waited for each worker.",
        [Query(f"avg_over_time({of('afl_worker_awaited')}[$__rate_interval])", "worker {{worker}}")],
        unit="percentunit",
    ),
]

TROUBLE: Final = [
    Panel(
        "Workers with a session",
        "Gaps are when a worker was away.",
        [Query(of("afl_worker_ready"), "worker {{worker}}")],
        is_stepped=True,
    ),
    Panel(
        "Incidents by kind",
        "Absent from a step, not finite, failed, restarted, without its residual, with another model.",
        [Query(f"sum by (incident) ({increase('afl_worker_incidents_total')})", "{{incident}}")],
    ),
    Panel(
        "Incidents by worker",
        "The same, of all kinds.",
        [Query(f"sum by (worker) ({increase('afl_worker_incidents_total')})", "worker {{worker}}")],
    ),
    Panel(
        "Sessions",
        "Opened, resumed by the same process, and refused.",
        [
            Query(increase("afl_sessions_opened_total"), "opened"),
            Query(increase("afl_reconnections_total"), "reconnections"),
            Query(increase("afl_refused_sessions_total"), "refused"),
            Query(of("afl_sessions"), "open"),
        ],
    ),
    Panel(
        "Reports",
        "Duplicate, late or refused; late and put back; steps that were closed without one.",
        [
            Query(increase("afl_refused_reports_total"), "not accepted"),
            Query(increase("afl_late_reports_total"), "late"),
            Query(increase("afl_absent_reports_total"), "absent"),
        ],
    ),
    Panel(
        "Starts",
        "Of the server, of workers as another process, and sums that began again.",
        [
            Query(of("afl_server_starts_total"), "server"),
            Query(of("afl_worker_restarts_total"), "workers"),
            Query(of("afl_round_restarts_total"), "sums"),
            Query(of("afl_replayed_steps_total"), "steps repeated from the log"),
        ],
        is_stepped=True,
    ),
    Panel(
        "Damage",
        "Failures of workers, residuals that were lost, models that differed.",
        [
            Query(of("afl_worker_failures_total"), "failures"),
            Query(of("afl_lost_residuals_total"), "lost residuals"),
            Query(of("afl_digest_mismatches_total"), "other models"),
        ],
        is_stepped=True,
    ),
]

PROCESS: Final = [
    Panel(
        "Memory",
        "Of the server's process, and what of it waits for a worker's turn in the sum.",
        [
            Query(of("process_resident_memory_bytes"), "resident"),
            Query(of("afl_waiting_bytes"), "waiting payloads"),
        ],
        unit="bytes",
    ),
    Panel(
        "CPU",
        "Cores that the server's process uses.",
        [Query(rate("process_cpu_seconds_total"), "cores")],
    ),
    Panel(
        "File descriptors",
        "Of the server's process.",
        [Query(of("process_open_fds"), "open"), Query(of("process_max_fds"), "limit")],
    ),
    Panel(
        "Disk",
        "The file system of the run directory.",
        [Query(of("afl_disk_free_bytes"), "free"), Query(of("afl_disk_size_bytes"), "size")],
        unit="bytes",
    ),
    Panel(
        "Certificates",
        "How long they still hold: the server's with TLS, and a worker's with client certificates.",
        [
            Query(f"{of('afl_certificate_expiry_seconds')} - time()", "server"),
            Query(f"{of('afl_worker_certificate_expiry_seconds')} - time()", "worker {{worker}}"),
        ],
        unit="s",
        width=24,
    ),
]

ROWS: Final = {
    "The run at a glance": GLANCE,
    "Losses by worker": LEARNING,
    "Dual weights": DUAL,
    "Traffic": TRAFFIC,
    "Rounds and stragglers": TIME,
    "Reconnections, restarts, refusals": TROUBLE,
    "Server process": PROCESS,
}

VARIABLES: Final = {
    "run": "label_values(afl_run_info, run_id)",
    "job": 'label_values(afl_run_info{run_id="$run"}, job)',
    "instance": 'label_values(afl_run_info{run_id="$run"}, instance)',
}
"""A run is chosen; which job and instance serve it follows."""


def dashboard_json() -> str:
    """The dashboard as Grafana imports it."""
    board = (
        dashboard.Dashboard("afl: a federation")
        .uid("afl-federation")
        .description("One run of afl: what it learns, how fast, and who holds it up.")
        .tags(["afl"])
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
    )
    for name, query in VARIABLES.items():
        board.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(_SOURCE)
            .query(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    for title, panels in ROWS.items():
        board.with_row(dashboard.Row(title))
        for panel in panels:
            board.with_panel(_built(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _built(panel: Panel) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel
    if panel.is_stat:
        built = stat.Panel().height(4).span(panel.width).graph_mode(looks.BigValueGraphMode.NONE)
        if panel.shows_name:
            built.text_mode(looks.BigValueTextMode.NAME)
    else:
        built = timeseries.Panel().height(8).span(panel.width).fill_opacity(0)
        built.legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        if panel.is_stepped:
            built.line_interpolation(looks.LineInterpolation.STEP_AFTER)
    built.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).ref_id(chr(ord("A") + index))
        target.legend_format(query.legend or "__auto").datasource(_SOURCE)
        built.with_target(target.instant() if panel.is_stat else target.range())
    if panel.bars:
        built.override_by_name(
            panel.bars,
            [
                models.DynamicConfigValue(id_val="custom.drawStyle", value="bars"),
                models.DynamicConfigValue(id_val="custom.axisPlacement", value="right"),
            ],
        )
    return built
