# sgda_momentum.py
"""SGDA whose server has momentum: v <- beta v + sum_i q_i g_i; all copies of the model: w <- w - eta_w v."""

import numpy as np

from afl import Algorithm, AlgorithmOption, Compressed, ProjectedAscent, UpdateServer


class SgdaMomentum(Algorithm):
    name = "sgda-momentum"
    description = "SGDA with momentum at the server"
    takes = frozenset({"eta_q"})  # of the options that several algorithms have
    options = (
        AlgorithmOption("momentum", "beta, how much of each step stays", default=0.9, least=0.0, most=1.0),
    )

    def server(self, settings, params, randomness):
        return MomentumServer(settings, params, randomness, ProjectedAscent(settings.workers, settings.eta_q))


class MomentumServer(UpdateServer):
    def __init__(self, settings, params, *others):
        super().__init__(settings, params, *others)
        self.beta = np.float32(settings.own["momentum"])
        self.velocity = np.zeros(len(params), dtype=np.float32)

    def update(self, total):  # what every copy of the model steps by, from the sum of the workers' messages
        self.velocity = self.beta * self.velocity + total
        return Compressed(self.velocity)

    def state(self):  # what a checkpoint keeps
        return {**super().state(), "velocity": self.velocity}

    def restore(self, state, position):
        super().restore(state, position)
        self.velocity = state["velocity"].copy()

    def replay(self, losses, payload, unsent):  # a round that was closed before a restart, from what was sent
        self.velocity = np.frombuffer(payload.data, dtype=np.float32).copy()
        super().replay(losses, payload, unsent)
