"""A kit for tests of federations: real processes, links that can be cut, clients that misbehave.

Nothing in it needs pytest, so that tests of your own tasks may use it too::

    with Federation({"workers": 2, "task": {...}, "algorithm": {...}}, folder) as federation:
        federation.start("0-1")
        federation.finish()
        weights = federation.model("final")
"""

from support.drill import Drill, Faults, result_of
from support.federation import Federation, run_together
from support.http2 import Http2Observer
from support.process import Process
from support.proxy import Proxy
from support.raw_client import RawClient
from support.reference import Reference, final_values

__all__ = [
    "Drill",
    "Faults",
    "Federation",
    "Http2Observer",
    "Process",
    "Proxy",
    "RawClient",
    "Reference",
    "final_values",
    "result_of",
    "run_together",
]
