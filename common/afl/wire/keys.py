"""Offers of keys and rosters to messages and back."""

from __future__ import annotations

from collections.abc import Sequence

from afl.core.secrecy.keys import KeyOffer
from afl.errors import ProtocolError
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, control

MOST_SIGNED_BYTES = 32 * 1024
"""Of an offer's signature, certificates and signer together: a chain of certificates has a few thousand."""


def key_offer_message(offer: KeyOffer) -> pb.KeyOffer:
    """The message of an offer."""
    return pb.KeyOffer(**vars(offer))


def key_offer_of(message: pb.KeyOffer) -> KeyOffer:
    """An offer. Raises ProtocolError if it is too long; nothing else of it is believed yet."""
    certificates = tuple(message.certificates)
    size = len(message.signature) + len(message.signer) + sum(map(len, certificates))
    if size > MOST_SIGNED_BYTES:
        raise ProtocolError(f"an offer of keys with {size} bytes to sign; {MOST_SIGNED_BYTES} are the most")
    return KeyOffer(
        message.epoch,
        tuple(message.workers),
        tuple(message.public_keys),
        message.signature,
        certificates,
        message.signer,
        message.roster,
    )


def roster_frame(epoch: int, offers: Sequence[KeyOffer]) -> Frame:
    """All keys of an epoch, as the workers have signed them."""
    kept = [pb.KeyOffer(**(vars(offer) | {"roster": b""})) for offer in offers]
    return control(pb.ServerFrame(roster=pb.Roster(epoch=epoch, offers=kept)))
