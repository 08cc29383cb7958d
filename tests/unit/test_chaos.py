"""The links that fail on purpose, and the order of the strikes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.faults import TOGETHER_S, Deck
from tests.chaos.proxy import DELAY_S, Link, Mode

COUNTS = {"gateway": 2, "router": 2, "worker": 3}


@asynccontextmanager
async def echoed() -> AsyncIterator[tuple[Link, int]]:
    """A link to a server that answers what it hears, and the port where the link listens."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = Link("echo", ("127.0.0.2", port), ("127.0.0.1", port))
    await link.start()
    await asyncio.sleep(0.2)
    try:
        yield link, port
    finally:
        await link.close()
        server.close()


async def said(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], text: bytes) -> bytes:
    connection[1].write(text)
    async with asyncio.timeout(1.0):
        return await connection[0].read(1000)


async def test_a_whole_link_passes_everything_on() -> None:
    async with echoed() as (_, port):
        connection = await asyncio.open_connection("127.0.0.2", port)
        assert await said(connection, b"one") == b"one"
        connection[1].close()


@pytest.mark.parametrize("mode", ["half_open", "stalled"])
async def test_a_silent_link_passes_nothing_on_and_breaks_only_what_lost_bytes(mode: Mode) -> None:
    async with echoed() as (link, port):
        connection = await asyncio.open_connection("127.0.0.2", port)
        assert await said(connection, b"one") == b"one"
        await link.turn(mode)
        with pytest.raises(TimeoutError):
            await said(connection, b"two")
        await link.turn("whole")
        if mode == "stalled":
            assert await said(connection, b"three") in (b"two", b"twothree")
        else:
            with pytest.raises(ConnectionResetError):
                await said(connection, b"three")
        connection[1].close()


async def test_a_slow_link_is_late_and_keeps_the_order() -> None:
    async with echoed() as (link, port):
        connection = await asyncio.open_connection("127.0.0.2", port)
        await link.turn("slow")
        began = asyncio.get_running_loop().time()
        assert await said(connection, b"one") == b"one"
        assert asyncio.get_running_loop().time() - began >= 2 * DELAY_S
        connection[1].close()


async def test_a_dropped_connection_is_reset_and_a_refusing_link_takes_no_new_one() -> None:
    async with echoed() as (link, port):
        connection = await asyncio.open_connection("127.0.0.2", port)
        await said(connection, b"one")
        assert link.drop() == 1
        with pytest.raises(ConnectionResetError):
            await said(connection, b"two")
        connection[1].close()
        await link.turn("refusing")
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)


def test_a_seed_gives_the_same_strikes_and_each_kind_comes_once_before_any_comes_again() -> None:
    deck = Deck(random.Random(1), COUNTS)
    strikes = list(itertools.islice(deck, len(deck)))
    assert strikes == list(itertools.islice(Deck(random.Random(1), COUNTS), len(deck)))
    for strike in strikes:
        targets = [fault.target.partition("/")[0] for fault in strike.faults]
        assert len(set(targets)) == len(targets)
        assert strike.apart_s <= TOGETHER_S
        roles = [fault.role for fault in strike.faults]
        assert roles.count("gateway") < 2
        assert roles.count("router") < 2
