"""Why a server cannot listen, before gRPC would say so in its own way."""

from __future__ import annotations

import socket

import pytest

from afl.config.address import Address, parse_listen
from afl.errors import AddressError
from afl_server.network.bind_check import check_bind


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "*"])
def test_a_port_that_is_taken(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"^server\.listen: cannot listen on .*:{port}: another proc"):
            check_bind("server.listen", parse_listen(f"{host}:{port}"))
    check_bind("server.listen", parse_listen(f"{host}:{port}"))


@pytest.mark.parametrize(
    ("host", "said"),
    [("192.0.2.1", "it is not an address of this machine"), ("no-such-host.invalid", "no such host")],
)
def test_an_address_of_no_or_another_machine(host: str, said: str) -> None:
    with pytest.raises(AddressError, match=f"cannot listen on {host}:5000: {said}"):
        check_bind("server.listen", Address(host, 5000))
