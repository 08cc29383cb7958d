"""One generation, from its spec to its end.

Owns the transcript. The one rule: an ordinary generation tells its one client from its transcript and is cancelled
with it; a resumable one (it has a journal) puts every run into its journal, and clients read what came back from it.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Final

from gateway import prompt, submission, validate
from gateway.attempt import Attempt
from gateway.auth import Principal
from gateway.custody import MAX_PLAN_BYTES, Ending, OwnerMoved, Plan, record_fields
from gateway.delivery import Delivery
from gateway.journal import Journal
from gateway.kit import Kit
from gateway.pacer import Pacer
from gateway.parts import Parts
from gateway.request import Operation, Request
from gateway.telemetry import Story
from gateway.transcript import Fit, Form, Run, Stop, Transcript
from gateway.view import Head
from shared import call, records, rpc
from shared.errors import Reason, TrunklineError, to_status
from shared.state import StateAway
from shared.tracing import inject
from shared.wire import Stamp, body_hash
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

# From when on keys are taken by a store that came back empty: every owner has told it again by then (a lease's life and
# more), and workers have let go of what dead owners left (ORPHAN_GRACE_S), so that no second run meets the first.
_KEYS_S: Final = 15.0
_WORDS: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


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
        raw_id: bytes | None = None,
    ) -> None:
        super().__init__(
            parts,
            principal,
            spec.model,
            operation=operation,
            budget_ms=budget_ms,
            trace_parent=trace_parent,
            raw_id=raw_id,
        )
        self.spec = spec
        self.client_id = spec.client_request_id
        self.whole = False  # its client gets all of it at once, at the end
        self.on_stuck: Callable[[], object] = lambda: None  # called once if the client takes nothing for too long
        self.delivery = Delivery(self, pacer, parts.clock, parts.manners)
        self.delivery.on_slow = self._give_up_client
        self.journal: Journal | None = None
        self.opened: dict[int, int] = {}  # an ordinary one is told from its beginning
        self._transcript: Transcript | None = None
        self._base = router_pb2.SubmitRequest()
        self._kit: Kit | None = None
        self._preferred = 0  # the worker incarnation that had it
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
            work = self._work_of(kit, len(ids))
            self._base = await prompt.off_loop(4 * len(ids), lambda: self._submission_of(work, ids))
        self._read_with(kit)
        return len(ids) + len(work.choices) * work.max_tokens

    def _read_with(self, kit: Kit) -> None:
        self._kit = kit
        form = form_of(self.raw_id, self.spec, self._base.submission.generate, kit)
        self._transcript = Transcript(form, kit.tokenizer, self.parts.clock)

    def _work_of(self, kit: Kit, prompt_tokens: int) -> worker_pb2.GenerateWork:
        """All but the prompt."""
        spec = self.spec
        return worker_pb2.GenerateWork(
            choices=[worker_pb2.ChoiceProgress(index=index) for index in range(self._choices)],
            sampling=validate.resolve_sampling(spec, kit.generation_config, self.parts.rng),
            max_tokens=validate.check_length(prompt_tokens, spec, self.version),
            min_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
        )

    def _submission_of(self, work: worker_pb2.GenerateWork, ids: list[int]) -> router_pb2.SubmitRequest:
        sender = self.sender(self.spec.priority, self.spec.session_id, self.spec.cache_salt)
        return submission.generation(sender, self.version, work, ids)

    @property
    def _choices(self) -> int:
        return self.spec.n if self.spec.HasField("n") else 1

    # Resumable ones.

    @property
    def resumable(self) -> bool:
        """It outlives its client and its gateway."""
        return self.journal is not None

    def keep(self, journal: Journal) -> None:
        """It is resumable: its story is told at its end, whoever is there."""
        self.journal, self._left = journal, True

    def restore(self, plan: Plan, kit: Kit, runs: list[Run], preferred: int, epoch: int) -> None:
        """Go on with what another gateway began, instead of being admitted."""
        self.version = common_pb2.ModelVersion.FromString(plan.served)
        self._base = router_pb2.SubmitRequest.FromString(plan.submit)
        sub = self._base.submission
        sub.gateway_id, sub.gateway_incarnation = self.parts.identity.id, self.parts.identity.incarnation
        self.accepted_ms, self._preferred = plan.accepted_ms, preferred
        self._read_with(kit)
        for run in runs:
            self.transcript.append(run)
        self._stamp = (epoch, 0)
        self.ran = bool(runs or preferred)
        self._reservation = self.parts.admission.adopt(self.principal.tenant, self.id)
        assert self.journal is not None, "only what is resumable is restored"
        self.journal.open()
        self._begin()

    def _context(self) -> contextvars.Context | None:
        """What outlives its call is not bound by that call's deadline."""
        if self.journal is None:
            return None
        context = contextvars.Context()
        context.run(call.begin, call.Call(clock=self.parts.clock, span=self.span))
        return context

    def plan(self) -> tuple[Stamp, Plan, int, Mapping[str, str | int]]:
        """What it takes to go on with it elsewhere: (epoch, attempt) now, plan, ms left, fields of its record."""
        plan = Plan(
            self.operation,
            self.principal.tenant,
            self.principal.key_id,
            self.spec.SerializeToString(),
            self._base.SerializeToString(),
            self.version.SerializeToString(),
            inject(self.span),
            self.accepted_ms,
        )
        size = len(plan.spec) + len(plan.submit)
        if size > MAX_PLAN_BYTES:
            raise TrunklineError(
                Reason.TOO_LARGE, f"a resumable request may have at most {MAX_PLAN_BYTES} bytes, this one has {size}"
            )
        record = record_fields(self.record())
        if self.spec.idempotency_key:
            record["idem"] = self.spec.idempotency_key
        return (self._stamp[0], max(1, self._stamp[1])), plan, round(self.remaining_s() * 1000), record

    async def _claim(self) -> None:
        if self.journal is not None:
            if self.spec.idempotency_key and await self.parts.custody.forgot(_KEYS_S):
                raise StateAway  # its request may be running, and its owner is still to say so
            self._owned = True
            await self.journal.claim()

    def claims(self) -> tuple[str, bytes] | None:
        """Its idempotency key and the hash of its body."""
        key = self.spec.idempotency_key
        return (key, body_hash(self.spec)) if key else None

    def _abandon(self) -> None:
        """It was not admitted."""
        super()._abandon()
        if self.journal is not None and self._owned:
            self.journal.abandon()
            self.parts.custody.unclaim(self.id, self.principal.tenant)
            self._release_key()

    def _release_key(self) -> None:
        if self.spec.idempotency_key:
            self.parts.custody.release(self.principal.tenant, self.spec.idempotency_key, self.id)

    def _write_record(self) -> None:
        """The end of a resumable one is written with its outputs."""
        if self.journal is None or not records.terminal(self.state) or self.journal.full:
            super()._write_record()
            return
        self.parts.records.forget(self.id)
        if not self.ran:
            self._release_key()

    async def queued(self, attempt: Attempt) -> None:
        """An attempt begins; a resumable one's is raised in the store first."""
        if self.journal is not None:
            await self.journal.raise_attempt(attempt.stamp)
        await super().queued(attempt)

    async def renew(self) -> None:
        """For another version, and so with another plan."""
        await super().renew()
        if self.journal is not None:
            await self.journal.claim()

    def head(self) -> Head:
        """What a view needs to know of it."""
        assert self._kit is not None, "the request was not prepared"
        return Head(self.started(), self.transcript.form, self._kit.tokenizer, self.operation)

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
        if self._preferred:
            request.preferred.append(self._preferred)
        return request

    def token(self, choice: int, index: int, token: int, now: float) -> bool:
        """One more token came. Every token of an ordinary generation passes here, but for the first and the last."""
        if self._transcript is None or self.journal is not None or not self._transcript.token(choice, index, token):
            return False
        self._last_at = now
        if not self.delivery.rung:
            self.delivery.ring()
        return True

    def append(self, run: Run) -> Fit:
        """Tokens came."""
        fit = self.transcript.append(run)
        if fit is Fit.TAKEN:
            self._ring()
            if self.journal is not None:
                self.journal.put(run)
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
        self.delivery.ring()

    # As a source of its own client's delivery.

    def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See `Delivery.events`."""
        return self.delivery.events()

    @property
    def over(self) -> bool:
        """It has ended."""
        return self.ended.is_set()

    @property
    def failed_unbegun(self) -> bool:
        """It ended with an error before there was a token."""
        return self.error is not None and not self.tokens

    def take(self) -> Iterable[inference_pb2.Delta]:
        """What is new in the transcript."""
        return self.transcript.take()

    def _give_up_client(self) -> None:
        self.cancel(Reason.SLOW_READER)
        self.on_stuck()

    def started(self) -> inference_pb2.Started:
        """The first event."""
        return inference_pb2.Started(
            request_id=self.id,
            model=self.model,
            version=self.version.version,
            prompt_tokens=self.usage.prompt_tokens,
            trace_id=self.trace_id,
            created_ms=self.accepted_ms,
        )

    def finished(self) -> inference_pb2.Finished:
        """The last event. Raises the TrunklineError it ended with."""
        if self.error is not None:
            if self.ran:
                rpc.mark_work_done()
            raise self.error
        self.told_receipt = self.receipt()
        return inference_pb2.Finished(usage=self.usage, receipt=self.told_receipt)

    # Its end.

    def receipt(self) -> common_pb2.Receipt:
        """Where the time went, until now."""
        if self._transcript is not None:
            self.stages.text_s = self._transcript.text_s
        self.stages.client_wait_s = self.delivery.client_wait_s
        return super().receipt()

    def _ended(self) -> None:
        if self.journal is not None and isinstance(self.error, OwnerMoved):
            self.journal.abandon()
        elif self.journal is not None:
            self.journal.end(self._ending(), records.fields(self.record()))
        self.delivery.ring()

    def _ending(self) -> Ending:
        if self.error is not None:
            return Ending(status=to_status(self.error).SerializeToString())
        return Ending(finished=self.finished().SerializeToString())

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


def form_of(request_id: bytes, spec: inference_pb2.GenerationSpec, work: worker_pb2.GenerateWork, kit: Kit) -> Form:
    """The form of a generation's transcript, from what was asked and what was made of it."""
    return Form(
        choices=len(work.choices),
        max_tokens=work.max_tokens,
        request_id=request_id,
        min_tokens=spec.min_tokens,
        stops=tuple(spec.stop),
        include_stop=spec.include_stop,
        prefix=kit.tokenizer.decode(work.prompt) if spec.echo else "",
        token_ids=spec.return_token_ids,
        logprobs=spec.sampling.HasField("logprobs"),
    )
