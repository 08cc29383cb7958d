"""Both ends of the mailbox: order, back-pressure, large frames, and the other side's death."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from shared.mailbox import MAX_FRAME, AsyncMailbox, Mailbox, MailboxClosed, MailboxFull, socket_pair

Pair = tuple[Mailbox, Mailbox]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = map(Mailbox, socket_pair())
    yield one, other
    one.close()
    other.close()


class Listener:
    """What an AsyncMailbox reported."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.closes = 0

    def on_close(self) -> None:
        self.closes += 1
        self.closed.set()

    async def take(self, count: int) -> list[bytes]:
        async with asyncio.timeout(10):
            return [await self.frames.get() for _ in range(count)]


@asynccontextmanager
async def opened(sock: socket.socket, **options: int) -> AsyncIterator[tuple[AsyncMailbox, Listener]]:
    listener = Listener()
    mailbox = await AsyncMailbox.open(sock, listener.frames.put_nowait, listener.on_close, **options)
    try:
        yield mailbox, listener
    finally:
        mailbox.close()


def fill(door: AsyncMailbox) -> int:
    """Send numbered frames of 60 kB until one is not taken; how many were."""
    for i in range(1000):
        try:
            door.send(struct.pack("<I", i) + bytes(60_000))
        except MailboxFull:
            return i
    raise AssertionError("60 MB were taken")


# --- the synchronous end ---


def test_frames_come_whole_and_in_order(pair: Pair) -> None:
    one, other = pair
    sent = [b"", b"a", b"x" * 70_000, bytes(range(256)) * 5]
    for frame in sent:
        one.send(frame)
    got: list[bytes] = []
    while len(got) < len(sent):
        got += other.recv_all(1.0)
    assert got == sent


def test_waiting_for_nothing_ends_in_time_and_with_nothing(pair: Pair) -> None:
    began = time.monotonic()
    assert pair[0].recv_all(0.05) == []
    assert 0.04 < time.monotonic() - began < 1.0
    assert pair[0].recv_all(0) == []


def test_a_frame_larger_than_every_buffer_arrives_while_the_other_side_reads(pair: Pair) -> None:
    one, other = pair
    frame = bytes(range(256)) * (20 << 12)  # 20 MiB
    one.send(frame)  # waits for nobody: it stays in the backlog
    got: list[bytes] = []
    while not got:
        one.recv_all(0)  # sends on
        got += other.recv_all(0)
    assert got == [frame]


def test_sending_waits_only_over_the_backlog_and_goes_on_when_the_other_side_reads() -> None:
    left, right = socket_pair()
    one, other = Mailbox(left, max_backlog=1 << 20), Mailbox(right)
    blocked = threading.Thread(target=lambda: [one.send(bytes(1 << 20)) for _ in range(8)])
    blocked.start()
    time.sleep(0.1)
    assert blocked.is_alive(), "8 MiB do not fit into a backlog of 1"
    got: list[bytes] = []
    while blocked.is_alive():
        got += other.recv_all(0.05)
    one.send(b"last")
    while got[-1:] != [b"last"]:
        one.recv_all(0)
        got += other.recv_all(0.05)
    assert [len(frame) for frame in got] == [1 << 20] * 8 + [4]
    one.close()
    other.close()


def test_what_was_sent_before_the_end_is_read_before_the_end_is_told(pair: Pair) -> None:
    one, other = pair
    one.send(b"goodbye")
    one.close()
    assert other.recv_all(1.0) == [b"goodbye"]
    with pytest.raises(MailboxClosed):
        other.recv_all(1.0)
    with pytest.raises(MailboxClosed):
        other.send(b"too late")


def test_a_waiting_reader_learns_of_the_end_at_once(pair: Pair) -> None:
    one, other = pair
    threading.Timer(0.05, one.close).start()
    began = time.monotonic()
    with pytest.raises(MailboxClosed):
        other.recv_all(5.0)
    assert time.monotonic() - began < 1.0


def test_a_waiting_sender_learns_of_the_end_at_once() -> None:
    left, right = socket_pair()
    one = Mailbox(left, max_backlog=0)
    threading.Timer(0.05, right.close).start()
    with pytest.raises(MailboxClosed):
        one.send(bytes(8 << 20))
    one.close()


def test_a_length_that_no_frame_can_have_ends_the_mailbox() -> None:
    left, right = socket_pair()
    mailbox = Mailbox(right)
    left.sendall(struct.pack("<I", MAX_FRAME + 1))
    with pytest.raises(MailboxClosed, match="over the limit"):
        mailbox.recv_all(1.0)
    left.close()
    mailbox.close()


def test_a_frame_over_the_limit_is_the_senders_mistake(pair: Pair) -> None:
    with pytest.raises(ValueError, match="over the limit"):
        pair[0].send(bytes(MAX_FRAME + 1))


# --- the end on a loop ---


async def test_both_ends_understand_each_other() -> None:
    left, right = socket_pair()
    engine = Mailbox(right)
    async with opened(left) as (door, heard):
        door.send(b"from the door")
        assert engine.recv_all(1.0) == [b"from the door"]
        engine.send(b"")
        engine.send(b"from the engine")
        assert await heard.take(2) == [b"", b"from the engine"]
        engine.close()
        await heard.closed.wait()
        with pytest.raises(MailboxClosed):
            door.send(b"too late")
    assert heard.closes == 1


async def test_a_side_that_does_not_read_fills_the_mailbox_and_nothing_blocks(unblocked: None) -> None:
    left, right = socket_pair()
    engine = Mailbox(right)
    async with opened(left, max_backlog=1 << 20) as (door, _):
        taken = fill(door)
        assert 1 < taken < 200
        got: list[bytes] = []
        while len(got) < taken:
            got += engine.recv_all(0)
            await asyncio.sleep(0)
        assert [struct.unpack_from("<I", frame)[0] for frame in got] == list(range(taken)), "of refused frames"
        assert door.backlog == 0
        door.send(b"on it goes")
        assert engine.recv_all(1.0) == [b"on it goes"]
    engine.close()


async def test_everything_sent_before_the_end_is_heard_before_it(unblocked: None) -> None:
    left, right = socket_pair()
    engine = Mailbox(right)
    async with opened(left) as (_, heard):
        for i in range(50):
            engine.send(bytes([i]) * 1000)
        engine.close()
        await heard.closed.wait()
        assert [frame[0] for frame in await heard.take(50)] == list(range(50))


async def test_closing_it_ourselves_is_no_event() -> None:
    left, right = socket_pair()
    async with opened(left) as (door, heard):
        door.close()
        door.close()
        await asyncio.sleep(0.01)
        assert heard.closes == 0
    right.close()


async def test_a_frame_that_cannot_be_handled_ends_the_mailbox_and_is_reported() -> None:
    left, right = socket_pair()
    reported: list[BaseException] = []
    closed = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def refuse(frame: bytes) -> None:
        raise ValueError("no such message")

    door = await AsyncMailbox.open(left, refuse, closed.set)
    Mailbox(right).send(b"?")
    async with asyncio.timeout(5):
        await closed.wait()
    assert door.closed
    assert [type(error) for error in reported] == [ValueError]
    right.close()


async def test_closing_it_while_a_frame_is_handled_stops_the_rest() -> None:
    left, right = socket_pair()
    got: list[bytes] = []

    def take(frame: bytes) -> None:
        got.append(frame)
        door.close()

    door = await AsyncMailbox.open(left, take, lambda: None)
    engine = Mailbox(right)
    engine.send(b"1")
    engine.send(b"2")
    await asyncio.sleep(0.05)
    assert got == [b"1"]
    engine.close()
