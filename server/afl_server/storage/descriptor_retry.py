"""Writing where file descriptors are short: that is no broken disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from afl.daemon import events
from afl.daemon.descriptors import is_short
from afl.errors import StorageError

LOG = logging.getLogger("afl.server")

RETRY_S: Final = 1.0
"""Between two tries to open a file without a descriptor."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def retry_without_descriptor(call: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
    """Write what ``call`` writes, again and again while there is no descriptor for it; on a thread that may
    wait.

    Raises:
        StorageError: if it cannot be written for another reason.
    """
    is_told = False
    while True:
        try:
            return call(*args, **named)
        except StorageError as error:
            if not is_short(error.__cause__):
                raise
            if not is_told:
                LOG.error(  # noqa: TRY400  # the message says all
                    "%s; it is tried again until there is a file descriptor for it: close what holds them, "
                    "or allow more (LimitNOFILE=, ulimit -n)",
                    error,
                    extra=events.DescriptorsShort().extra,
                )
                is_told = True
        time.sleep(RETRY_S)
