"""What a prepared process does to become a daemon or a command. It has imported all of ours."""

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
    shown: Connection | None,
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
    output = nowhere if shown is None else shown.fileno()
    for descriptor, target in enumerate((nowhere, output, log.fileno())):
        os.dup2(target, descriptor)
    os.close(nowhere)
    for connection in filter(None, (log, shown)):
        connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:0] = ["", *paths]
    if environment.get("AFL_FAULT_POINTS") or any(Path(path, "afl").is_dir() for path in paths):
        # The variable is read as its module is imported; and there may be another release of ours.
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("afl")]:
            del sys.modules[name]
    warnings.simplefilter("error", UserWarning)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
