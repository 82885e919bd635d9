"""A process's keyring: its own keys, and who it believes others to be."""

from __future__ import annotations

import datetime as dt
import os

from afl.core.secrecy.keyring import Keyring
from afl.core.secrecy.keys import KeyOffer, KeyStore
from afl.security.peers import PeerSigner, PeerTrust, Signed
from afl_worker.options import WorkerOptions


def keyring_of(
    run_id: str,
    options: WorkerOptions,
    workers: int,
    files: tuple[PeerSigner, PeerTrust],
    store: KeyStore,
) -> Keyring:
    """That of a run of m workers. Raises PeerError if these are too few."""
    signer, trust = files

    def sign(statement: bytes) -> tuple[bytes, tuple[bytes, ...], bytes]:
        signed = signer.sign(statement)
        return signed.signature, signed.certificates, signed.public_key

    def verify(offer: KeyOffer) -> None:
        signed = Signed(offer.signature, offer.certificates, offer.signer)
        trust.verify(offer.workers, offer.statement(run_id), signed, dt.datetime.now(dt.UTC))

    return Keyring(
        run_id,
        options.workers,
        workers,
        least=options.min_workers,
        sign=sign,
        verify=verify,
        random=os.urandom,
        store=store,
    )
