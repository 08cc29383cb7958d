"""Where generations come from: new ones, those that a client comes back to, and those that another gateway left behind.

All faces of the gateway start them here. The one rule: an ordinary generation lives inside its client's scope; a
resumable one outlives it, and every client of it, the first one too, only has a view.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar, cast

from gateway import cursor as cursors
from gateway import validate
from gateway.admission import KeyTaken
from gateway.auth import Limits, Principal
from gateway.custody import Custody, News, Plan
from gateway.delivery import Delivery
from gateway.generation import Generation, form_of
from gateway.journal import RETRY_S, Journal, Journals, Log
from gateway.kit import Kit
from gateway.pacer import Pacer
from gateway.parts import Parts
from gateway.request import Operation, draining
from gateway.view import Head, View
from shared.errors import Reason, TrunklineError
from shared.state import StateAway
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.router.v1 import router_pb2

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_READERS_S: Final = 1.0
_POLL_S: Final = 0.02  # of a follower while tokens come
_POLL_MOST_S: Final = 0.2
_RESTORE_S: Final = 6.0  # for owners to tell a store that came back empty what they have


class Generations:
    """See the module. Run `run` as a task."""

    def __init__(self, parts: Parts, journals: Journals, default_window_s: float = 60.0) -> None:
        self._parts = parts
        self._journals = journals
        self._custody: Custody = parts.custody
        self._default_window_s = default_window_s
        self._open: dict[Delivery, None] = {}
        self._admitting: dict[asyncio.Task[None], None] = {}
        self._taking: dict[asyncio.Task[Generation | None], None] = {}
        self._following: dict[View, None] = {}
        self.pacer = Pacer()

    async def run(self) -> None:
        """Watch for clients that take nothing, until cancelled."""
        while True:
            await asyncio.sleep(_READERS_S)
            for delivery in list(self._open):
                delivery.check_reader()

    @property
    def streams(self) -> int:
        """Clients that are being told."""
        return len(self._open)

    def leave(self) -> None:
        """The gateway drains: those who read here what another gateway owns go there with their cursors."""
        for view in self._following:
            if not view.whole:
                view.log.interrupt()

    async def close(self) -> None:
        """End admissions and take-overs whose clients have left."""
        tasks = [*self._admitting, *self._taking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def start(
        self,
        spec: inference_pb2.GenerationSpec,
        principal: Principal,
        *,
        operation: Operation,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AsyncIterator[Generation | View]:
        """A scope that admits on entry (raises TrunklineError). On exit an ordinary generation that is not over is
        cancelled; a resumable one goes on for its window. One whose idempotency key is known is joined.

        The principal is authenticated and may use the model. `budget_ms`: the call's own deadline, None without one.
        """
        named = [ms for ms in (budget_ms, spec.deadline_ms) if ms]
        generation = Generation(
            self._parts,
            principal,
            spec,
            self.pacer,
            operation=operation,
            budget_ms=min(named, default=None),
            trace_parent=trace_parent,
        )
        if not validate.resumable(spec):
            async with generation.scope():
                with self._watched(generation.delivery):
                    yield generation
            return
        try:
            async with self._begun(generation) as view:
                yield view
            return
        except KeyTaken as exc:
            taken = exc
        if not taken.same:
            raise _conflict("the idempotency key was used for another request")
        async with self.resume(principal.tenant, taken.request_id, "", keyed=True) as view:
            yield view

    @asynccontextmanager
    async def _begun(self, generation: Generation) -> AsyncIterator[View]:
        """A view of a new resumable generation. Its admission goes on if the client leaves meanwhile."""
        window_s = generation.spec.resume_window_ms / 1000 or self._default_window_s
        journal = Journal(self._journals, generation, generation.principal.tenant, window_s)
        generation.keep(journal)
        with _reading(journal):
            admitting = asyncio.get_running_loop().create_task(generation.admit())
            self._admitting[admitting] = None
            admitting.add_done_callback(self._admitted)
            await asyncio.shield(admitting)
            with self._viewing(generation.head(), journal.log) as view:
                view.headroom = generation.headroom
                yield view

    def _admitted(self, task: asyncio.Task[None]) -> None:
        self._admitting.pop(task, None)
        if not task.cancelled():
            task.exception()  # told to the client if it is still there

    @asynccontextmanager
    async def resume(self, tenant: str, request_id: str, cursor: str, keyed: bool = False) -> AsyncIterator[View]:
        """A view of a generation of this tenant, from a cursor on (empty: from its beginning), wherever it is owned.

        Raises REQUEST_UNKNOWN, BAD_FIELD, RESUME_DIVERGED, STATE_AWAY, DRAINING, and FEATURE_OFF where it cannot be
        resumed.
        `keyed`: it was found by its idempotency key, under which nothing runs twice: REQUEST_UNKNOWN is a conflict.
        """
        if self._parts.lifecycle.refusing:
            raise draining()
        place = cursors.decode(cursor) if cursor else None
        if place is not None and place.request_id.hex() != request_id:
            raise _unknown()
        journal = self._journals.find(request_id)
        if journal is not None and isinstance(journal.owner, Generation):
            if journal.tenant != tenant:
                raise _unknown()
            with _reading(journal), self._viewing(journal.owner.head(), journal.log) as view:
                if place is not None:
                    view.seek(place, cursor)
                yield view
            return
        try:
            follower = await self._find(tenant, request_id)
        except TrunklineError as exc:
            if keyed and exc.reason in (Reason.REQUEST_UNKNOWN, Reason.FEATURE_OFF):
                raise _conflict(
                    "the request of this idempotency key was made, and its outputs are kept no longer"
                ) from exc
            raise
        with self._viewing(follower.head, follower.log) as view:
            try:
                if place is not None:
                    view.seek(place, cursor)
            except StateAway:
                await follower.succeed()  # or nobody would ever bring it as far as its client has read
                raise
            except TrunklineError as exc:
                if exc.reason is Reason.RESUME_DIVERGED and await self._custody.forgot(_RESTORE_S):
                    raise StateAway from exc  # its owner is telling the store again what the client has
                raise
            self._following[view] = None
            try:
                async with follower.following(view):
                    yield view
            finally:
                del self._following[view]

    async def _find(self, tenant: str, request_id: str) -> Follower:
        """A follower that has read what there is."""
        found = await self._custody.plan(request_id)
        if found is None:
            if await self._custody.forgot(_RESTORE_S):
                raise StateAway  # its owner will tell the store again, perhaps its record before its plan
            record = await self._parts.records.get(request_id)
            if record is None or record.tenant != tenant:
                raise _unknown()
            raise TrunklineError(Reason.FEATURE_OFF, "the generation cannot be resumed")
        plan, fields = found
        if plan.tenant != tenant:
            raise _unknown()
        kit = await self._parts.catalog.kit(common_pb2.ModelVersion.FromString(plan.served))
        follower = Follower(
            self, self._custody, request_id, plan, _head(request_id, plan, fields.get("trace", ""), kit)
        )
        await follower.read()
        return follower

    async def take_over(self, tenant: str, request_id: str) -> Generation | None:
        """Own a resumable request whose lease has lapsed and go on with it; None if it has an owner or is over.

        Waits while the store is away. Raises DRAINING, NO_REPLICA (the model's files cannot be had).
        """
        parts = self._parts
        if parts.lifecycle.draining:
            raise draining()
        found = await self._custody.plan(request_id)
        if found is None or found[0].tenant != tenant:
            return None
        plan, fields = found
        kit = await parts.catalog.kit(common_pb2.ModelVersion.FromString(plan.served))
        # From here on it is followed through, whoever leaves: a request that is owned here must run here.
        # In a context of its own: it belongs to the trace of the request, not to that of the call that found it.
        taking = asyncio.get_running_loop().create_task(
            self._take(request_id, plan, fields, kit), context=contextvars.Context()
        )
        self._taking[taking] = None
        taking.add_done_callback(self._taken)
        return await asyncio.shield(taking)

    async def _take(self, request_id: str, plan: Plan, fields: Mapping[str, str], kit: Kit) -> Generation | None:
        taken = await _insist(lambda again: self._custody.take_over(request_id, plan.tenant, again))
        if taken is None:
            if self._parts.table.live(request_id) is None:
                self._custody.disown(request_id, plan.tenant)
            return None
        epoch, left_ms = taken
        news = await _insist(lambda _: self._custody.follow(request_id))  # after this nobody appends but us
        generation = self._made_again(request_id, plan, left_ms)
        window_s = int(fields.get("window", "0")) / 1000
        generation.keep(Journal(self._journals, generation, plan.tenant, window_s, epoch, news))
        generation.restore(plan, kit, news.runs, int(fields.get("winc", "0"), 16), epoch)
        _log.info("took request %s over at epoch %d", request_id, epoch)
        return generation

    def _taken(self, task: asyncio.Task[Generation | None]) -> None:
        self._taking.pop(task, None)
        if not task.cancelled():
            task.exception()  # told to the client if it is still there

    def _made_again(self, request_id: str, plan: Plan, left_ms: int) -> Generation:
        nothing = frozenset[str]()
        principal = Principal(plan.key_id, plan.tenant, nothing, nothing, Limits(1, 1, 1))
        return Generation(
            self._parts,
            principal,
            inference_pb2.GenerationSpec.FromString(plan.spec),
            self.pacer,
            operation=cast(Operation, plan.operation),
            budget_ms=max(1, left_ms),
            trace_parent=plan.trace,
            raw_id=bytes.fromhex(request_id),
        )

    @contextmanager
    def _viewing(self, head: Head, log: Log) -> Iterator[View]:
        if len(self._open) >= 2 * self._parts.limits.max_in_flight:
            raise TrunklineError(
                Reason.QUEUE_FULL, "the gateway tells as many streams as it can", retry_after_s=1.0
            )  # fmt: skip
        view = View(head, log, self.pacer, self._parts.clock, self._parts.manners)
        try:
            with self._watched(view.delivery):
                yield view
        finally:
            view.close()

    @contextmanager
    def _watched(self, delivery: Delivery) -> Iterator[None]:
        self._open[delivery] = None
        self.pacer.streams = len(self._open)
        try:
            yield
        finally:
            del self._open[delivery]
            self.pacer.streams = len(self._open)


class Follower:
    """Reads a request that another gateway owns, and takes it over when its lease has lapsed."""

    def __init__(self, generations: Generations, custody: Custody, request_id: str, plan: Plan, head: Head) -> None:
        self.log = Log()
        self.head = head
        self._generations = generations
        self._custody = custody
        self._id = request_id
        self._tenant = plan.tenant
        self._last = "0-0"
        self._journal: Journal | None = None

    async def read(self) -> News:
        """Read what is new."""
        news = await self._custody.follow(self._id, self._last)
        self._last = news.last
        if news.runs or news.ending:
            self.log.add(news.runs, news.ending)
        return news

    async def succeed(self) -> None:
        """Own it if nobody does any more; it goes on whether or not somebody reads it now."""
        if (await self.read()).lapsed:
            await self._generations.take_over(self._tenant, self._id)

    @asynccontextmanager
    async def following(self, view: View) -> AsyncIterator[None]:
        """Keep `view` told inside the scope."""
        task = asyncio.get_running_loop().create_task(self._follow(view))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if self._journal is not None:
                self._journal.detach()

    async def _follow(self, view: View) -> None:
        try:
            await self._to_its_end(view)
        except StateAway:
            self.log.interrupt()
        except TrunklineError as error:
            view.fail(error)
        except Exception:
            _log.exception("following request %s failed", self._id)
            view.fail(TrunklineError(Reason.INTERNAL, "internal error"))

    async def _to_its_end(self, view: View) -> None:
        pause_s = _POLL_S
        while True:
            news = await self.read()
            if self.log.ending is not None:
                return
            if not news.rank and await self._custody.forgot(_RESTORE_S):
                raise StateAway
            if news.rank not in (1, 2) or not news.resumable:
                raise TrunklineError(Reason.OWNER_LOST, "the generation cannot be resumed any more")
            if news.lapsed and await self._take_over(view):
                return
            pause_s = _POLL_S if news.runs else min(_POLL_MOST_S, pause_s * 1.5)
            await asyncio.sleep(pause_s)

    async def _take_over(self, view: View) -> bool:
        """Nobody owns it: own it, unless somebody was faster."""
        generation = await self._generations.take_over(self._tenant, self._id)
        if generation is None or generation.journal is None:
            return False
        self._journal = generation.journal
        self._journal.attach()
        view.move(self._journal.log)
        return True


async def _insist(ask: Callable[[bool], Awaitable[_T]]) -> _T:
    """The answer, though the store be away for a while; `ask` is told whether it asks again."""
    again = False
    while True:
        try:
            return await ask(again)
        except StateAway:
            again = True
            await asyncio.sleep(RETRY_S)


@contextmanager
def _reading(journal: Journal) -> Iterator[None]:
    journal.attach()
    try:
        yield
    finally:
        journal.detach()


def _head(request_id: str, plan: Plan, trace_id: str, kit: Kit) -> Head:
    spec = inference_pb2.GenerationSpec.FromString(plan.spec)
    work = router_pb2.SubmitRequest.FromString(plan.submit).submission.generate
    started = inference_pb2.Started(
        request_id=request_id,
        model=spec.model,
        version=common_pb2.ModelVersion.FromString(plan.served).version,
        prompt_tokens=len(work.prompt),
        trace_id=trace_id,
        created_ms=plan.accepted_ms,
    )
    form = form_of(bytes.fromhex(request_id), spec, work, kit)
    return Head(started, form, kit.tokenizer, plan.operation)


def _unknown() -> TrunklineError:
    return TrunklineError(Reason.REQUEST_UNKNOWN, "no such request")


def _conflict(message: str) -> TrunklineError:
    return TrunklineError(Reason.IDEMPOTENCY_CONFLICT, message)
