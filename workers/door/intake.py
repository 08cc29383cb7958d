"""From a Submission to work for the engine: what is wrong with it, what it needs, what is left to do.

Pure. The one rule: `malformed` comes first and reads nothing but the submission, so that a bad one changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shared.errors import Reason
from shared.wire import spec_hash
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door.execution import BulkResult, Choice, unit_bytes
from workers.door.ledger import Need
from workers.engine import messages as m
from workers.engine.refusals import refusal

Mismatch = worker_pb2.Mismatch
MAX_CHOICES = 128
MAX_BULK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine life serves."""

    incarnation: int
    artefact_hash: str
    tokenizer_hash: str
    features: frozenset[str]
    vocab_size: int
    max_context: int  # prompt and output tokens of a sequence
    block_size: int  # tokens of a KV block
    kv_tokens: int  # tokens of the KV pool
    vector_bytes: int  # of one embedding
    sequences: int  # most that the engine holds


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why it cannot be served here."""

    what: Mismatch.What
    message: str


@dataclass(frozen=True, slots=True)
class Intake:
    """A submission made ready. Token ids of `choices` are those the owner has."""

    work: m.Admit | m.Encode | None  # None: nothing is left to do
    need: Need
    choices: Sequence[Choice] = ()
    bulk: BulkResult | None = None
    logprobs: int = -1  # as in `messages.Sampling`


def malformed(sub: worker_pb2.Submission) -> Flaw | None:
    """What no worker could make sense of."""
    problem = next(_problems(sub), None)
    return Flaw(Mismatch.WHAT_MALFORMED, problem) if problem else None


def mismatch(sub: worker_pb2.Submission, served: Served) -> Flaw | None:
    """What this worker does not serve."""
    if sub.artefact_hash != served.artefact_hash:
        return Flaw(Mismatch.WHAT_ARTEFACT, "another artefact is served here")
    if sub.tokenizer_hash != served.tokenizer_hash:
        return Flaw(Mismatch.WHAT_TOKENIZER, "another tokenizer is served here")
    if sub.adapter_hash:
        return Flaw(Mismatch.WHAT_ADAPTER, "the adapter is not here")
    missing = {*sub.required_features, *_needed(sub)} - served.features
    if missing:
        return Flaw(Mismatch.WHAT_FEATURE, f"not served here: {', '.join(sorted(missing))}"[:200])
    return None


def prepare(sub: worker_pb2.Submission, key: int, served: Served) -> Intake | Flaw:
    """The work of a well-formed submission, or why it can never fit."""
    intake = _generation(sub, key, served) if sub.HasField("generate") else _encoding(sub, key, served)
    if intake.work is None:
        return intake
    refused = refusal(intake.work, served.vocab_size, served.max_context)
    if refused is not None:
        too_large = refused.reason is not Reason.BAD_FIELD
        return Flaw(Mismatch.WHAT_TOO_LARGE if too_large else Mismatch.WHAT_MALFORMED, refused.message)
    return _too_large(intake, served) or intake


def token_bytes(ids: Iterable[int]) -> bytes:
    """Ids as `messages.pack_tokens` makes them; ids of 2³¹ and more come out negative, for `refusal` to see."""
    return array("I", ids).tobytes()


def _problems(sub: worker_pb2.Submission) -> Iterator[str]:
    if len(sub.request_id) != 16:
        yield "request_id must have 16 bytes"
    if not (sub.epoch and sub.attempt):
        yield "epoch and attempt count from 1"
    if not (sub.gateway_id and sub.gateway_incarnation):
        yield "the gateway must have an id and an incarnation"
    if not sub.budget_ms:
        yield "budget_ms must be at least 1"
    if len(sub.cache_scope) not in (0, 32):
        yield "cache_scope must have 32 bytes"
    work = sub.WhichOneof("work")
    if work == "generate":
        yield from _generate_problems(sub.generate)
    elif work == "encode":
        if not sub.encode.inputs or not all(each.ids for each in sub.encode.inputs):
            yield "inputs must be given and not be empty"
    else:
        yield "the work is of no known kind"
    if sub.spec_hash != spec_hash(sub):
        yield "spec_hash is not the hash of this submission"


def _generate_problems(work: worker_pb2.GenerateWork) -> Iterator[str]:
    if not work.prompt:
        yield "the prompt is empty"
    if not 1 <= len(work.choices) <= MAX_CHOICES:
        yield f"there must be 1 to {MAX_CHOICES} choices"
    if sorted(choice.index for choice in work.choices) != list(range(len(work.choices))):
        yield "choices must be numbered from 0"
    if not work.max_tokens or work.min_tokens > work.max_tokens:
        yield "max_tokens must be at least 1 and at least min_tokens"
    if any(len(choice.emitted) > work.max_tokens for choice in work.choices):
        yield "a choice has more than max_tokens"


def _needed(sub: worker_pb2.Submission) -> Iterator[str]:
    yield sub.WhichOneof("work") or ""
    if sub.generate.sampling.HasField("logprobs"):
        yield "logprobs"


def _generation(sub: worker_pb2.Submission, key: int, served: Served) -> Intake:
    work, sampling = sub.generate, _sampling(sub.generate.sampling)
    choices, runs = [], []
    for given in sorted(work.choices, key=lambda choice: choice.index):
        emitted = token_bytes(given.emitted)
        finish = given.finish or (m.Finish.LENGTH if len(given.emitted) == work.max_tokens else m.Finish.NONE)
        choices.append(Choice(emitted, finish, unit_bytes(sampling.logprobs)))
        if not finish:
            runs.append(m.ChoiceIn(given.index, emitted))
    longest = min(work.max_tokens, served.max_context - len(work.prompt))
    need = Need(
        sequences=len(runs),
        kv_tokens=len(work.prompt) + len(runs) * longest,
        prefill_tokens=sum(len(work.prompt) + len(run.emitted) // 4 for run in runs),
        longest=len(work.prompt) + max(longest - 1, 0),
    )
    admit = m.Admit(
        key=key,
        prompt=token_bytes(work.prompt),
        choices=runs,
        sampling=sampling,
        max_tokens=work.max_tokens,
        min_tokens=work.min_tokens,
        stop_token_ids=list(work.stop_token_ids),
        ignore_eos=work.ignore_eos,
        priority=sub.priority,
        budget_ms=sub.budget_ms,
        cache_scope=sub.cache_scope,
        traceparent=sub.traceparent,
    )
    return Intake(admit if runs else None, need, choices, logprobs=sampling.logprobs)


def _encoding(sub: worker_pb2.Submission, key: int, served: Served) -> Intake:
    lengths = [len(each.ids) for each in sub.encode.inputs]
    need = Need(len(lengths), sum(lengths), sum(lengths), longest=max(lengths))
    encode = m.Encode(
        key=key,
        inputs=[token_bytes(each.ids) for each in sub.encode.inputs],
        normalize=sub.encode.normalize,
        priority=sub.priority,
        budget_ms=sub.budget_ms,
        traceparent=sub.traceparent,
    )
    return Intake(encode, need, bulk=BulkResult(len(lengths), served.vector_bytes, sum(lengths)))


def _too_large(intake: Intake, served: Served) -> Flaw | None:
    need = intake.need
    if need.longest > served.kv_tokens:
        return _large(f"{need.longest} tokens of cache are needed, this worker has {served.kv_tokens}")
    if need.sequences > served.sequences:
        return _large(f"{need.sequences} sequences at once are too many, the limit is {served.sequences}")
    if intake.bulk is not None and intake.bulk.total > MAX_BULK_BYTES:
        return _large(f"the embeddings take more than {MAX_BULK_BYTES} bytes")
    return None


def _large(message: str) -> Flaw:
    return Flaw(Mismatch.WHAT_TOO_LARGE, message)


def _sampling(given: common_pb2.Sampling) -> m.Sampling:
    """As the engine takes it; what is unset gets its neutral value (the gateway sets every field)."""
    return m.Sampling(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=given.top_k,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=dict(given.logit_bias),
        logprobs=given.logprobs if given.HasField("logprobs") else -1,
        seed=given.seed,
    )
