"""What both ends of a gRPC connection must agree on."""

from __future__ import annotations

from afl.wire.frames import MAX_FRAME_OVERHEAD

KEEPALIVE_TIME_MS = 30_000
"""HTTP/2 pings on an idle connection, below the idle timeouts of common load balancers (AWS NLB 350 s,
GCP 600 s, Azure 4 min)."""

KEEPALIVE_TIMEOUT_MS = 20_000

MIN_PING_INTERVAL_MS = 10_000
"""What a receiver tolerates; below the sender's interval, so that "too many pings" cannot happen."""


WINDOW_BYTES = 4 * 1024 * 1024
"""What may be under way on a stream: 80 MB/s at a round trip of 50 ms."""


def channel_options(chunk_bytes: int) -> list[tuple[str, int]]:
    """gRPC options for server and client alike. The largest message accepted is one chunk and its
    surroundings, however large the model."""
    largest = chunk_bytes + MAX_FRAME_OVERHEAD
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # A fixed window instead of a probed one, which grows with the speed of the link: a server's memory
        # would grow with it, for each stream.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # Two servers on one port must be an error, not a lottery.
        ("grpc.so_reuseport", 0),
    ]
