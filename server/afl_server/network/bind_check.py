"""Whether an address can be listened on, asked of the operating system before gRPC is: gRPC's own failure
writes to standard error past the log and does not say why."""

from __future__ import annotations

import socket

from afl.config.address import Address, is_wildcard, why_not_listened
from afl.errors import AddressError


def check_bind(key: str, address: Address) -> None:
    """Bind to the address for a moment, as gRPC will; one of what a name stands for is enough.

    Args:
        key: the configuration's, for the message.

    Raises:
        AddressError: saying why it cannot be listened on.
    """
    # A machine without IPv6 listens on every address that it has.
    hosts = ["::", "0.0.0.0"] if is_wildcard(address.host) else [address.host]  # noqa: S104
    try:
        found = [
            entry
            for host in hosts
            for entry in socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)
        ]
    except socket.gaierror as error:
        raise AddressError(
            f"{key}: cannot listen on {address}: no such host ({error.strerror}); name an address of "
            "this machine"
        ) from error
    failure: OSError | None = None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: what is left of closed connections does not keep the address.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            failure = error
        else:
            return
    assert failure is not None
    raise AddressError(f"{key}: cannot listen on {address}: {why_not_listened(failure)}") from failure
