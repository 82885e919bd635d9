"""MLflow: a store in the run directory's ``trackers/mlflow``, or where ``MLFLOW_TRACKING_URI`` says."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from afl.optional_dependencies import check_installed
from afl.runs.tracking.tracker import Status, TrackedRound, TrackedRun

EXPERIMENT = "afl"  # unless `MLFLOW_EXPERIMENT_NAME` names another
RUN_TAG = "afl.run_id"
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # in one call: MLflow's own limits
_MOST_CHARACTERS = 500  # of a parameter's value: the limit of MLflow's older stores
_STATUSES: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """One MLflow run, found again by the tag ``afl.run_id`` when the run is resumed."""

    def __init__(self) -> None:
        check_installed("mlflow", "log to MLflow", "mlflow")
        self._uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not self._uri:
            for module in ("sqlalchemy", "alembic"):
                check_installed(module, "keep an MLflow store in the run directory", "mlflow")
        self._client: Any = None
        self._id = ""

    def started(self, run: TrackedRun) -> None:
        """Make the MLflow run, or open it again."""
        # It would tell its makers of its use otherwise.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.entities import Param  # noqa: PLC0415  # takes seconds
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        folder = run.folder.resolve()
        self._client = MlflowClient(self._uri or f"sqlite:///{folder / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        location = None if self._uri else (folder / "artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(name, location)
        known = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {RUN_TAG: run.run_id, "afl.directory": str(run.directory.resolve())}
        made = self._client.create_run(experiment, run_name=run.directory.name, tags=tags)
        self._id = made.info.run_id
        params = [Param(key, str(value)[:_MOST_CHARACTERS]) for key, value in run.config.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        """Log the rounds' metrics, with the round as the step."""
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, each.round) for each in rounds for name, value in each.metrics.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])

    def ended(self, status: Status) -> None:
        """Give the MLflow run its final status."""
        self._client.set_terminated(self._id, _STATUSES[status])
