"""What a journal shows was acknowledged, and what is in the store folds to the same transcript, whatever the store does
meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from gateway.custody import Custody, Ending, Plan
from gateway.journal import Journal, Journals
from gateway.tokens import Tokenizer
from gateway.transcript import STOP, Fit, Form, Run, Transcript
from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason
from shared.ids import Identity
from shared.state import StateAway, Store
from shared.wire import Stamp
from tests.fakes.gateway_client import until
from tests.fakes.mesh import TEXT_TOKENS, tokenizer_json
from tests.fakes.valkey import Valkey

TOKENIZER = Tokenizer(tokenizer_json())
FORM = Form(choices=3, max_tokens=500, token_ids=True)
ENDING = Ending(finished=b"whole")


class OwnerOfOne:
    """Owns a request without running it."""

    def __init__(self, number: int = 0xCD) -> None:
        self.id = f"{number:02x}" * 16
        self.cancelled: list[Reason] = []

    def plan(self) -> tuple[Stamp, Plan, int, Mapping[str, str | int]]:
        return (1, 1), Plan("chat", "a", "k", b"", b"", b"", ("", ""), 0), 60_000, {"tenant": "a"}

    def claims(self) -> tuple[str, bytes] | None:
        return ("key", b"body")

    def cancel(self, reason: Reason) -> None:
        self.cancelled.append(reason)


@asynccontextmanager
async def writing(url: str, number: int = 1) -> AsyncIterator[Journals]:
    store = Store(url, SYSTEM_CLOCK, name=f"g{number}")
    await store.start()
    journals = Journals(Custody(store, Identity("gateway", f"g{number}", number)), SYSTEM_CLOCK)
    task = asyncio.create_task(journals.run())
    try:
        yield journals
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await store.close()


def text(runs: list[Run]) -> list[tuple[str, int]]:
    transcript = Transcript(FORM, TOKENIZER, SYSTEM_CLOCK)
    assert all(transcript.append(run) in (Fit.TAKEN, Fit.KNOWN) for run in runs)
    return [(delta.text, delta.finish_reason) for delta in transcript.take()]


async def generate(journal: Journal, rng: random.Random, harm: Mapping[int, object]) -> list[Run]:
    """Runs of three choices, in pieces; `harm` is done before the steps it names."""
    sent, made = [0, 0, 0], []
    for step in range(150):
        act = harm.get(step)
        if callable(act):
            act()
        choice = rng.randrange(3)
        ids = [rng.randrange(TEXT_TOKENS) for _ in range(rng.randint(1, 4))]
        made.append(Run(choice, sent[choice], ids))
        sent[choice] += len(ids)
        journal.put(made[-1])
        await asyncio.sleep(0.01)
    for choice in range(3):
        made.append(Run(choice, sent[choice], [], STOP, 5))
        journal.put(made[-1])
    journal.end(ENDING, {"state": "FINISHED"})
    return made


async def told(valkey: Valkey, harm: Mapping[int, object]) -> None:
    async with writing(valkey.url) as journals:
        owner = OwnerOfOne()
        journal = Journal(journals, owner, "a", window_s=60)
        await journal.claim()
        journal.attach()
        seen: list[int] = []

        def look() -> None:
            seen.append(len(journal.log.runs))

        journal.log.join(look)
        made = await generate(journal, random.Random(3), harm)
        await until(lambda: journal.log.ending is not None, 15)
        assert journal.log.runs == made
        assert seen == sorted(seen)
        assert len(journals) == 0
        news = await journals.custody.follow(owner.id)
        assert text(news.runs) == text(made)
        assert (news.rank, news.ending) == (3, ENDING)
        assert not owner.cancelled


async def test_a_journal_is_its_transcript(valkey: Valkey) -> None:
    await told(valkey, {})


async def test_a_store_that_stands_still_for_a_while_costs_nothing(valkey: Valkey) -> None:
    await told(valkey, {40: valkey.pause, 90: lambda: asyncio.get_running_loop().call_later(1.0, valkey.resume)})


async def test_a_store_that_comes_back_empty_is_told_everything_again(valkey: Valkey) -> None:
    def again() -> None:
        valkey.kill()
        valkey.start()

    await told(valkey, {40: again, 100: again})


async def test_nothing_is_shown_that_was_not_acknowledged(valkey: Valkey) -> None:
    async with writing(valkey.url) as journals:
        journal = Journal(journals, OwnerOfOne(), "a", window_s=60)
        await journal.claim()
        valkey.pause()
        journal.put(Run(0, 0, [1]))
        await asyncio.sleep(0.3)
        assert not journal.log.runs
        await until(lambda: journal.log.breaks > 0)
        valkey.resume()
        await until(lambda: journal.log.runs == [Run(0, 0, [1])])


async def test_an_owner_that_was_overtaken_is_told_and_shows_nothing_more(valkey: Valkey) -> None:
    async with writing(valkey.url) as journals, writing(valkey.url, 2) as others:
        owner = OwnerOfOne()
        journal = Journal(journals, owner, "a", window_s=60)
        await journal.claim()
        await journals.custody.hold([(owner.id, 1, 0)], lease_ms=0)
        assert await others.custody.take_over(owner.id, "a") is not None
        journal.put(Run(0, 0, [1]))
        await until(lambda: owner.cancelled == [Reason.OWNER_MOVED])
        assert not journal.log.runs
        assert journal.log.breaks == 1
        assert len(journals) == 0


async def test_what_is_let_go_is_taken_over_at_once_whatever_was_being_written(valkey: Valkey) -> None:
    async with writing(valkey.url) as journals, writing(valkey.url, 2) as others:
        for number in range(1, 21):
            owner = OwnerOfOne(number)
            journal = Journal(journals, owner, "a", window_s=60)
            await journal.claim()
            journal.put(Run(0, 0, [1]))
            raising = asyncio.create_task(journal.raise_attempt((1, 2)))
            await asyncio.sleep(random.Random(number).choice((0, 0.0002, 0.0005, 0.001)))
            await journals.let_go()
            assert owner.cancelled == [Reason.OWNER_MOVED]
            assert journal.log.breaks == 1
            raising.cancel()
            assert await others.custody.take_over(owner.id, "a") is not None, "its lease was renewed meanwhile"
        assert len(journals) == 0


async def test_what_ends_while_it_is_let_go_has_its_end_written(valkey: Valkey) -> None:
    async with writing(valkey.url) as journals, writing(valkey.url, 2) as others:
        owner = OwnerOfOne()
        journal = Journal(journals, owner, "a", window_s=60)
        await journal.claim()
        letting_go = asyncio.create_task(journals.let_go())
        await asyncio.sleep(0)  # its lease is being written
        journal.end(ENDING, {"state": "FINISHED"})
        await letting_go
        await until(lambda: journal.log.ending is not None, 5)
        news = await others.custody.follow(owner.id)
        assert (news.rank, news.ending) == (3, ENDING)
        assert not owner.cancelled


async def test_only_what_somebody_goes_on_with_is_let_go_before_the_end(valkey: Valkey) -> None:
    async with writing(valkey.url) as journals, writing(valkey.url, 2) as others:
        told, untold, unread, followed, half = (OwnerOfOne(number) for number in range(1, 6))
        made = {owner: Journal(journals, owner, "a", window_s=60) for owner in (told, untold, unread, followed, half)}
        for owner, journal in made.items():
            await journal.claim()
            for _ in range({told: 1, untold: 1, half: 2}.get(owner, 0)):
                journal.attach()
        made[told].log.join(lambda: None, lambda: True)
        made[untold].log.join(lambda: None, lambda: False)
        made[half].log.join(lambda: None, lambda: True)  # the other one is still being made
        async with asyncio.timeout(5):
            while not made[followed].movable:  # its owner hears of it when it renews the lease
                await others.custody.follow(followed.id)
                await asyncio.sleep(0.05)
        await journals.let_go(every=False)
        assert {owner for owner in made if owner.cancelled} == {told, followed}
        await journals.let_go()
        assert all(owner.cancelled == [Reason.OWNER_MOVED] for owner in made)


async def test_what_the_store_has_forgotten_is_not_let_go_until_it_knows_it_again(valkey: Valkey) -> None:
    async with writing(valkey.url) as journals, writing(valkey.url, 2) as others:
        owner = OwnerOfOne()
        journal = Journal(journals, owner, "a", window_s=60)
        await journal.claim()
        valkey.kill()
        valkey.start()
        while not owner.cancelled:
            with suppress(StateAway):
                await journals.let_go()
            await asyncio.sleep(0.05)
        forgot = False
        while not forgot:
            with suppress(StateAway):
                forgot = await others.custody.forgot(5.0)
            await asyncio.sleep(0.05)
        assert await others.custody.take_over(owner.id, "a") is not None
