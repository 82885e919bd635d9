"""What a round of Flower's SecAgg+ takes: its own workflow and its own mod, all parties in one process.

    python -m venv flower && flower/bin/pip install flwr==1.42.0
    flower/bin/python benchmarks/flower_secagg.py --dim 100000 --workers 10

Messages become protocol buffers and messages again between the server and each client, as in Flower's
connections, and their bytes are counted; there is no network. Before it, the same round by Flower's default
workflow, which sends the same vectors without masks. `python -m afl_benchmarks.masks` is ours, driven the
same way, without protocol buffers.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.compat.common import recorddict_compat
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.server import ServerConfig
from flwr.server.client_manager import SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.default_workflows import default_fit_workflow
from flwr.serverapp.grid import Grid
from flwr.supercore.task_identity import TaskIdentity

DOWN, UP = "down", "up"


class InProcess(Grid):
    """A connection to clients in this process.

    Attributes:
        sent: bytes by direction since :meth:`reset`, of all clients.
        messages: how many, both ways, of all clients.
        coding: CPU seconds of making messages to bytes and back.
    """

    def __init__(self, client: ClientApp, nodes: Iterable[int]) -> None:
        self._client = client
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in nodes}
        self.reset()

    def reset(self) -> None:
        """Count from nothing."""
        self.sent = {DOWN: 0, UP: 0}
        self.messages = 0
        self.coding = 0.0

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002
    ) -> Iterable[Message]:
        """One exchange with each client."""
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            arrived = self._carried(message, DOWN)
            replies.append(self._carried(self._client(arrived, self.contexts[node]), UP))
        return replies

    def _carried(self, message: Message, direction: str) -> Message:
        start = time.process_time()
        data = message_to_proto(message).SerializeToString()
        self.sent[direction] += len(data)
        self.messages += 1
        arrived = message_from_proto(MessageProto.FromString(data))
        self.coding += time.process_time() - start
        return arrived

    def get_node_ids(self) -> Iterable[int]:
        """All of them."""
        return self.contexts

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Not used."""
        raise NotImplementedError

    push_messages = pull_messages = create_message


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shares", type=int, help="that a key is split into; all workers' without it")
    parser.add_argument("--threshold", type=float, default=0.7, help="of the shares, to open a mask")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # Without them no message can be made.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    vectors = np.random.default_rng(1).normal(0, 0.01, (options.workers, options.dim)).astype(np.float32)
    shares = options.shares or options.workers
    threshold = max(2, round(options.threshold * shares))
    masked = SecAggPlusWorkflow(
        # As an integer it must be above the threshold; 1.0 is all.
        num_shares=1.0 if shares == options.workers else shares,
        reconstruction_threshold=options.threshold if shares == options.workers else threshold,
    )
    print(f"{options.workers} workers, d {options.dim}, {shares} shares, {threshold} open a mask")
    for name, workflow, mods in (
        ("without masks", default_fit_workflow, []),
        ("SecAgg+", masked, [secaggplus_mod]),
    ):
        print(f"\n{name}")
        for what, figure in _figures(options.rounds, workflow, mods, vectors).items():
            print(f"{what:42}{figure:12,.1f}")


def _figures(rounds: int, workflow: Any, mods: list[Any], vectors: np.ndarray) -> dict[str, float]:
    """The shortest round, and what it sent.

    Raises:
        AssertionError: if the mean is not that of the vectors.
    """
    workers, dim = vectors.shape
    grid = InProcess(_client(vectors, mods), range(1, workers + 1))
    manager = SimpleClientManager()
    for node in grid.contexts:
        manager.register(GridClientProxy(node, grid, 1))
    strategy = FedAvg(min_fit_clients=workers, min_available_clients=workers)
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), ServerConfig(), strategy, manager)
    model = ndarrays_to_parameters([np.zeros(dim, dtype=np.float32)])
    best = (float("inf"), 0.0)
    for round_ in range(1, rounds + 1):
        context.state[MAIN_PARAMS_RECORD] = recorddict_compat.parameters_to_arrayrecord(model, True)
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round_})
        grid.reset()
        start = time.process_time()
        workflow(grid, context)
        best = min(best, (time.process_time() - start, grid.coding))
    (mean,) = context.state[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    assert np.abs(mean - vectors.mean(axis=0)).max() < 1e-2, np.abs(mean - vectors.mean(axis=0)).max()
    return {
        "a round, all parties, CPU ms": 1e3 * best[0],
        "of it coding messages, CPU ms": 1e3 * best[1],
        "messages, a client and round": grid.messages / workers,
        "bytes up, a client and round": grid.sent[UP] / workers,
        "bytes down, a client and round": grid.sent[DOWN] / workers,
        "largest error of the mean, 1e-6": 1e6 * float(np.abs(mean - vectors.mean(axis=0)).max()),
    }


def _client(vectors: np.ndarray, mods: list[Any]) -> ClientApp:
    """Clients that answer with their vector, whatever the model is; each counts 100 examples."""

    class Client(NumPyClient):
        def __init__(self, node: int) -> None:
            self._vector = vectors[node - 1]

        def fit(self, parameters: Any, config: Any) -> tuple[list[np.ndarray], int, dict[str, Any]]:  # noqa: ARG002
            return [self._vector], 100, {}

    return ClientApp(client_fn=lambda context: Client(context.node_id).to_client(), mods=mods)


if __name__ == "__main__":
    main()
