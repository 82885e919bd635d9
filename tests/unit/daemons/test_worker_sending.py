"""What waits to be sent goes in order, replies go first, and no more is under way than the pace allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from afl.core.messages import Encoding, PayloadHeader, Role
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, chunk_frame, control
from afl.wire.pace import CAREFUL_BYTES, Pace
from afl_worker.network.sending import QUESTION, REPLY, Sending

CHUNK = 1024 * 1024
SIZE = 4 * CAREFUL_BYTES


def fails(error: Exception) -> None:
    raise error


def chunk() -> Frame:
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, SIZE // 4, SIZE // 4, SIZE)
    return chunk_frame(pb.WorkerFrame, header, 0, memoryview(bytes(SIZE)))


def careful() -> Sending:
    sending = Sending(fails)
    sending.keep_pace(Pace(CHUNK, is_careful=True))
    return sending


def test_in_order_to_the_end() -> None:
    sending = Sending(fails)
    frames = [control(pb.WorkerFrame(goodbye=pb.Goodbye(reason=str(number)))) for number in range(5)]
    sending.put(frames[:2])
    sending.put(frames[2:])
    sending.put(None)
    assert list(sending.messages()) == [frame.data for frame in frames]
    assert sending.sent_bytes == sum(len(frame.data) for frame in frames)


def test_a_large_piece_waits_for_an_answer_and_replies_go_meanwhile() -> None:
    sending = careful()
    sending.put([chunk()])
    sending.put(None)
    messages = sending.messages()
    sent = [next(messages), next(messages)]
    assert sent[1] == QUESTION
    sending.reply()
    assert next(messages) == REPLY
    rest = Rest(messages, answering=sending)
    assert not rest.taken.wait(0.2), "it did not wait"
    sending.answered()
    assert rest.ended.wait(10)
    data = b"".join(
        piece.data
        for message in [*sent, *rest.messages]
        for piece in pb.WorkerFrame.FromString(message).chunks
    )
    assert data == bytes(SIZE)


@pytest.mark.parametrize("how", ["stop", "close"])
def test_who_waits_for_an_answer_that_never_comes_can_be_ended(how: str) -> None:
    sending = careful()
    sending.put([chunk()])
    rest = Rest(sending.messages())
    assert rest.taken.wait(10)
    if how == "close":
        sending.put(None)
    sending.stop()
    assert rest.ended.wait(10)


def test_what_shows_that_all_has_come_lets_the_next_go() -> None:
    sending = careful()
    messages = sending.messages()
    for _ in range(20):
        # In one piece, as a small report is.
        sending.put([Frame(bytes(100_000), control(pb.WorkerFrame()).content)])
        assert len(next(messages)) == 100_000
        sending.all_arrived()


def test_a_message_that_cannot_be_made_is_told_of_and_others_still_go() -> None:
    """gRPC would end the stream, and the next one would find the same."""

    def broken() -> Iterator[Frame]:
        raise MemoryError
        yield

    told: list[Exception] = []
    sending = Sending(told.append)
    goodbye = control(pb.WorkerFrame(goodbye=pb.Goodbye(reason="out of memory")))
    sending.put(broken())
    sending.put([goodbye])
    sending.put(None)
    assert list(sending.messages()) == [goodbye.data]
    assert [type(error) for error in told] == [MemoryError]


class Rest:
    """Takes the rest of the messages on a thread of its own, and answers questions."""

    def __init__(self, messages: Iterator[bytes], *, answering: Sending | None = None) -> None:
        self._answering = answering
        self.messages: list[bytes] = []
        self.taken, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self._take, args=(messages,), daemon=True).start()

    def _take(self, messages: Iterator[bytes]) -> None:
        for message in messages:
            self.messages.append(message)
            self.taken.set()
            if message == QUESTION and self._answering is not None:
                self._answering.answered()
        self.ended.set()
