"""gRPC's own health service (grpc.health.v1), which anyone may ask: each call of it has a deadline."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb

_SERVICE: Final = "grpc.health.v1.Health"
MOST_CALLS: Final = 64  # at once, of all peers together; one more is told to come later
_Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]


class Health:
    """What is said of services' health.

    Both methods are served as streams: where gRPC itself waits for a call's one message, nothing says for how
    long.

    Args:
        services: by name; the empty name is of the server as a whole.
        patience: seconds after which a call that is not over ends with ``DEADLINE_EXCEEDED``.
    """

    def __init__(self, services: tuple[str, ...], patience: float) -> None:
        self._services = services
        self._patience = patience
        self._status: int = pb.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._calls = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """For a server to add."""
        kinds = {"Check": self._check, "Watch": self._watch}
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                name: grpc.stream_stream_rpc_method_handler(
                    self._within_patience(answer),
                    pb.HealthCheckRequest.FromString,
                    pb.HealthCheckResponse.SerializeToString,
                )
                for name, answer in kinds.items()
            },
        )

    def set(self, status: int) -> None:
        """Tell all who watch, and whoever asks from now on."""
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    def _within_patience(self, answer: Any) -> Any:
        async def bounded(_requests: object, context: _Context) -> None:
            if self._calls >= MOST_CALLS:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_CALLS} calls are open; later")
            self._calls += 1
            try:
                async with asyncio.timeout(self._patience):
                    await answer(context)
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"this call has {self._patience:g} s; ask again"
                )
            finally:
                self._calls -= 1

        return bounded

    async def _check(self, context: _Context) -> None:
        request = await context.read()
        if not isinstance(request, pb.HealthCheckRequest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a check has one message")
        elif request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "")
        else:
            await context.write(pb.HealthCheckResponse(status=self._status))

    async def _watch(self, context: _Context) -> None:
        request = await context.read()
        if not isinstance(request, pb.HealthCheckRequest):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a watch has one message")
        is_known = request.service in self._services
        while True:
            changed = self._changed
            status = self._status if is_known else pb.HealthCheckResponse.SERVICE_UNKNOWN
            await context.write(pb.HealthCheckResponse(status=status))
            await changed.wait()
