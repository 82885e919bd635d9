"""A task tried before any federation: its model, its loss, its data, and what a run will cost.

Users' tests may call :func:`check_task`; ``afl check`` shows the same.
"""

from afl_lab.check.checker import check_config, check_task
from afl_lab.check.findings import Finding, Level, Report

__all__ = ["Finding", "Level", "Report", "check_config", "check_task"]
