"""Which proxy a worker's second connection takes: the one that gRPC takes."""

from __future__ import annotations

import pytest

from afl_worker.diagnosis import outbound_proxy

FIRST, SECOND = "http://one.example:3128", "http://two.example:3128"


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({}, None),
        ({"https_proxy": ""}, None),
        ({"https_proxy": FIRST}, "one.example"),
        ({"http_proxy": SECOND}, "two.example"),
        ({"http_proxy": SECOND, "https_proxy": FIRST}, "one.example"),
        ({"https_proxy": SECOND, "grpc_proxy": FIRST}, "one.example"),
        ({"https_proxy": FIRST, "no_proxy": "localhost, .example.org"}, None),
        ({"https_proxy": FIRST, "no_proxy": "other.org"}, "one.example"),
        ({"https_proxy": FIRST, "no_proxy": "silo.example.org", "no_grpc_proxy": "b.org"}, "one.example"),
        ({"https_proxy": FIRST, "no_proxy": ","}, "one.example"),
    ],
)
def test_the_proxy_is_the_one_that_grpc_takes(environment: dict[str, str], proxy: str | None) -> None:
    found = outbound_proxy("silo.example.org", environment)
    assert (None if found is None else found.hostname) == proxy
