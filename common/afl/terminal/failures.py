"""How a command ends that cannot go on."""

from __future__ import annotations

import sys
import traceback

from afl.errors import AflError, ExitCode
from afl.user_code import worth_tracing


def failed(program: str, error: AflError) -> ExitCode:
    """Say on standard error why the command ends; returns its exit code."""
    raised = worth_tracing(error)
    if raised is not None:
        traceback.print_exception(raised)
    print(f"{program}: {error}", file=sys.stderr)
    return error.exit_code
