"""One generation, from its spec to the events a client sees.

Owns the transcript and its delivery. The one rule: the consumer of `events` takes whatever has accumulated, at its own
pace; what is not taken waits in the transcript, which is bounded by max_tokens, and a client that takes nothing for too
long is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from gateway import prompt, submission, validate
from gateway.auth import Principal
from gateway.kit import Kit
from gateway.pacer import Pacer
from gateway.parts import Parts
from gateway.request import Operation, Request
from gateway.telemetry import Story
from gateway.transcript import Fit, Form, Run, Stop, Transcript
from shared import rpc
from shared.errors import Reason
from shared.wire import Stamp
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

_READERS_S: Final = 1.0
_WORDS: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


class Generations:
    """Where generations come from. All faces of the gateway start them here."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._open: set[Generation] = set()
        self.pacer = Pacer()

    async def run(self) -> None:
        """Watch for clients that take nothing, until cancelled."""
        while True:
            await asyncio.sleep(_READERS_S)
            for generation in list(self._open):
                generation.check_reader()

    @asynccontextmanager
    async def start(
        self,
        spec: inference_pb2.GenerationSpec,
        principal: Principal,
        *,
        operation: Operation,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AsyncIterator[Generation]:
        """A scope that admits on entry (raises TrunklineError) and cancels on exit what is not over.

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
        async with generation.scope():
            self._open.add(generation)
            self.pacer.streams = len(self._open)
            try:
                yield generation
            finally:
                self._open.discard(generation)
                self.pacer.streams = len(self._open)


class Generation(Request):
    """See the module. Also the work of its attempts: it hands runs to the transcript and wakes the consumer."""

    lane = worker_pb2.LANE_TOKENS

    def __init__(
        self,
        parts: Parts,
        principal: Principal,
        spec: inference_pb2.GenerationSpec,
        pacer: Pacer,
        *,
        operation: Operation,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> None:
        super().__init__(
            parts, principal, spec.model, operation=operation, budget_ms=budget_ms, trace_parent=trace_parent
        )
        self.spec = spec
        self.client_id = spec.client_request_id
        self.on_stuck: Callable[[], object] = lambda: None  # called once if the client takes nothing for too long
        self._pacer = pacer
        self._transcript: Transcript | None = None
        self._base = router_pb2.SubmitRequest()
        self._news = asyncio.Event()
        self._news_at = 0.0
        self._offered_at: float | None = None  # since when an event waits for the client
        self._taken_at = 0.0
        self._first_at: float | None = None  # of the whole request, over all attempts
        self._last_at = 0.0

    # Preparation.

    async def _prepare(self) -> int:
        spec, parts = self.spec, self.parts
        session = submission.session_key(self.principal.tenant, spec.session_id) if spec.session_id else b""
        self.version = version = parts.catalog.choose(spec.model, session)
        began = parts.clock.monotonic()
        validate.validate(spec, version)
        self.stages.admit_s += parts.clock.monotonic() - began
        with self.stage("tokenise"):
            kit = await parts.catalog.kit(version)
            ids = await prompt.off_loop(prompt.size(spec), lambda: prompt.encode(kit, spec))
            work = self._work_of(kit, ids)
            self._base = await prompt.off_loop(4 * len(ids), lambda: self._submission_of(work))
        self._transcript = Transcript(self._form(kit, work), kit.tokenizer, parts.clock)
        return len(ids) + len(work.choices) * work.max_tokens

    def _work_of(self, kit: Kit, ids: list[int]) -> worker_pb2.GenerateWork:
        spec = self.spec
        return worker_pb2.GenerateWork(
            prompt=ids,
            choices=[worker_pb2.ChoiceProgress(index=index) for index in range(self._choices)],
            sampling=validate.resolve_sampling(spec, kit.generation_config, self.parts.rng),
            max_tokens=validate.check_length(len(ids), spec, self.version),
            min_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
        )

    def _submission_of(self, work: worker_pb2.GenerateWork) -> router_pb2.SubmitRequest:
        sender = self.sender(self.spec.priority, self.spec.session_id, self.spec.cache_salt)
        return submission.generation(sender, self.version, work)

    def _form(self, kit: Kit, work: worker_pb2.GenerateWork) -> Form:
        spec = self.spec
        return Form(
            choices=self._choices,
            max_tokens=work.max_tokens,
            min_tokens=spec.min_tokens,
            stops=tuple(spec.stop),
            include_stop=spec.include_stop,
            prefix=kit.tokenizer.decode(work.prompt) if spec.echo else "",
            token_ids=spec.return_token_ids,
            logprobs=spec.sampling.HasField("logprobs"),
        )

    @property
    def _choices(self) -> int:
        return self.spec.n if self.spec.HasField("n") else 1

    @property
    def transcript(self) -> Transcript:
        """The transcript; there once the request is admitted."""
        assert self._transcript is not None, "the request was not prepared"
        return self._transcript

    # What its attempts ask and bring.

    @property
    def work(self) -> Generation:
        """Itself."""
        return self

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return self._transcript.tokens if self._transcript else 0

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return self.transcript.complete

    def submission(self, stamp: Stamp) -> router_pb2.SubmitRequest:
        """The prompt and what was emitted so far."""
        request = router_pb2.SubmitRequest()
        request.CopyFrom(self._base)
        request.submission.epoch, request.submission.attempt = stamp
        if self.tokens:
            del request.submission.generate.choices[:]
            request.submission.generate.choices.extend(self.transcript.progress())
            request.prefill_tokens += self.tokens
        return request

    def append(self, run: Run) -> Fit:
        """Tokens came."""
        fit = self.transcript.append(run)
        if fit is Fit.TAKEN:
            self._ring()
        return fit

    def piece(self, piece: worker_pb2.BulkPiece) -> Fit:
        """Nothing of a generation travels in pieces."""
        return Fit.DIVERGED

    def stops(self) -> Sequence[Stop]:
        """Choices ended here."""
        return self.transcript.stops()

    def next_indices(self) -> list[worker_pb2.NextIndex]:
        """Where each choice goes on."""
        return self.transcript.next_indices()

    def _ring(self) -> None:
        now = self._last_at = self.parts.clock.monotonic()
        if self._first_at is None:
            self._first_at = now
        if not self._news.is_set():
            self._news_at = now
            self._news.set()

    # Delivery.

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Started with the first token, the end or a heartbeat that is due; deltas and heartbeats; Finished. Or raises
        the TrunklineError the request ends with."""
        started = False
        while True:
            idle = not await self._wait()
            over = self.over.is_set()
            deltas = self.transcript.take()
            if over and self.error is not None and not started and not self.tokens:
                break
            if not started:
                started = True
                yield self._offer(inference_pb2.GenerateResponse(started=self._started()))
            for delta in deltas:
                yield self._offer(inference_pb2.GenerateResponse(delta=delta))
            if over:
                break
            if idle:
                yield self._offer(inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat()))
            self._took()
        self._took()
        if self.error is not None:
            if self.ran:
                rpc.mark_work_done()
            raise self.error
        yield self._offer(inference_pb2.GenerateResponse(finished=self._finished()))
        self._offered_at = None

    async def _wait(self) -> bool:
        """Wait for news or the end; False if a heartbeat is due instead."""
        hold_s = self._taken_at + self._pacer.hold_s - self.parts.clock.monotonic()
        if hold_s > 0 and not self.over.is_set():
            await asyncio.sleep(hold_s)
        try:
            async with asyncio.timeout(self.parts.limits.heartbeat_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        now = self.parts.clock.monotonic()
        if hold_s <= 0:
            self._pacer.waited(now - self._news_at, now)
        self._taken_at = now
        return True

    def _offer(self, event: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """From here until the next `_took` or `_offer` the client is waited for."""
        self._took()
        self._offered_at = self.parts.clock.monotonic()
        return event

    def _took(self) -> None:
        if self._offered_at is not None:
            self.stages.client_wait_s += self.parts.clock.monotonic() - self._offered_at
            self._offered_at = None

    def check_reader(self) -> None:
        """Cancel it if the client has taken nothing for too long."""
        if self._offered_at is None:
            return
        if self.parts.clock.monotonic() - self._offered_at > self.parts.limits.slow_reader_s:
            self._offered_at = None
            self.cancel(Reason.SLOW_READER)
            self.on_stuck()

    def _started(self) -> inference_pb2.Started:
        return inference_pb2.Started(
            request_id=self.id,
            model=self.model,
            version=self.version.version,
            prompt_tokens=self.usage.prompt_tokens,
            trace_id=self.trace_id,
            created_ms=self.accepted_ms,
        )

    def _finished(self) -> inference_pb2.Finished:
        self.told_receipt = self.receipt()
        return inference_pb2.Finished(usage=self.usage, receipt=self.told_receipt)

    # Its end.

    def receipt(self) -> common_pb2.Receipt:
        """Where the time went, until now."""
        if self._transcript is not None:
            self.stages.text_s = self._transcript.text_s
        return super().receipt()

    def _ended(self) -> None:
        self._news_at = self.parts.clock.monotonic()
        self._news.set()

    @property
    def usage(self) -> common_pb2.Usage:
        """Prompt, and the transcript's tokens."""
        prompt_tokens = len(self._base.submission.generate.prompt)
        cached = min(self.stages.last.cached_tokens, prompt_tokens)
        return common_pb2.Usage(
            prompt_tokens=prompt_tokens, completion_tokens=self.tokens, cached_tokens=cached
        )  # fmt: skip

    def _finish_word(self) -> str:
        return ",".join(sorted({_WORDS[finish] for finish in self.transcript.finishes() if finish}))

    def _story(self) -> Story:
        accepted, tokens = self.stages.accepted, self.tokens
        first, last = self._first_at, self._last_at
        finishes = self._transcript.finishes() if self._transcript else []
        return self.story(
            asked=self._asked(),
            finishes=[_WORDS.get(finish, "error") for finish in finishes],
            to_first_s=first - accepted if first is not None else None,
            between_s=(last - first) / (tokens - 1) if first is not None and tokens > 1 else None,
        )

    def _asked(self) -> dict[str, str | int | float | list[str]]:
        """What was asked for, by its gen_ai names; sampling as it was resolved."""
        work, spec = self._base.submission.generate, self.spec
        found: dict[str, str | int | float | list[str]] = {}
        if work.max_tokens:
            sampling = work.sampling
            found |= {
                "gen_ai.request.max_tokens": work.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
            }
        if spec.sampling.HasField("seed"):
            found["gen_ai.request.seed"] = str(spec.sampling.seed)  # an attribute's integers are signed
        if self._choices != 1:
            found["gen_ai.request.choice.count"] = self._choices
        return found
