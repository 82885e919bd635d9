"""What a prepared process does to become a daemon. It imports nothing of ours before the daemon does."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path


def become(
    arguments: tuple[str, ...],
    folder: Path,
    environment: dict[str, str],
    log: Connection,
    compiled: Path | None,
) -> None:
    """Run a module as ``python -m`` would."""
    if compiled is not None:
        # Wherever else it would be kept, and even where it would not: our modules take half as long then.
        sys.pycache_prefix, sys.dont_write_bytecode = str(compiled), False
    # What is there already is no daemon's garbage. To look through PyTorch's objects for it, and to copy
    # their memory for that, takes each a fifth of a second, once it is set up.
    gc.freeze()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor, target in enumerate((nowhere, nowhere, log.fileno())):
        os.dup2(target, descriptor)
    os.close(nowhere)
    log.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    warnings.simplefilter("error", UserWarning)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
