"""What door and engine say to each other: msgpack frames over `shared.mailbox`.

Owns the message types only. The one rule: keys are the door's own u32 numbers, never reused within one engine
life; the engine knows nothing of request ids, gateways or fencing. Token ids travel as int32 little-endian bytes.
Times are milliseconds of the sender's own monotonic clock differences, never absolute times.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

TokenBytes = bytes


def pack_tokens(ids: Iterable[int]) -> TokenBytes:
    """Token ids as int32 little-endian bytes."""
    return np.fromiter(ids, dtype="<i4").tobytes()


def unpack_tokens(data: TokenBytes) -> npt.NDArray[np.int32]:
    """The ids of `pack_tokens`, shape [n], int32 (read-only view)."""
    return np.frombuffer(data, dtype="<i4")


class Finish(enum.IntEnum):
    """Why a choice ended (values equal `trunkline.common.v1.FinishReason`)."""

    NONE = 0
    STOP = 1  # end-of-sequence token, stop token or stop string
    LENGTH = 2  # max_tokens or the context is full


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. Order of steps: bias, penalties, temperature, top-k, top-p, min-p (as in transformers)."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int = -1  # -1 = none, n = the chosen token's and the n best, of the raw distribution
    seed: int = 0  # u64; Philox4x32-10 key; counter = (position, choice, 0, 0)

    @property
    def penalised(self) -> bool:
        """True when a draw depends on the values of the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class ChoiceIn(msgspec.Struct, frozen=True, array_like=True):
    """One choice to run, with the tokens it already has (after a migration)."""

    index: int
    emitted: TokenBytes = b""


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit"):
    """Start generating. Only choices without a finish are listed; `len(emitted) < max_tokens` for each."""

    key: int
    prompt: TokenBytes
    choices: Sequence[ChoiceIn]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    priority: int = 0  # higher first
    budget_ms: int = 0  # 0 = none; backup enforcement of the deadline
    cache_scope: bytes = b""  # h0 of the prefix hash (wire rule 15); empty = do not share
    traceparent: str = ""


class Encode(msgspec.Struct, frozen=True, array_like=True, tag="encode"):
    """Mean-pooled final hidden states of each input, normalised to length 1 if asked."""

    key: int
    inputs: Sequence[TokenBytes]
    normalize: bool = True
    priority: int = 0
    budget_ms: int = 0
    traceparent: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop a request and free what it holds; unknown keys are ignored. Answered by `Freed`."""

    key: int


class StopChoice(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """A stop string was seen: end one choice (no further tokens). Unknown or ended choices are ignored."""

    key: int
    choice: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Keep the request but schedule nothing for it (its reader is slow), or let it go on."""

    key: int
    paused: bool


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine process after the current step."""


ToEngine = Admit | Encode | Cancel | StopChoice | Pause | Shutdown


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token and of the best ones, raw distribution (before penalties, temperature)."""

    chosen: float
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive new tokens of one choice; a finish travels with the last token (or with none)."""

    key: int
    choice: int
    index: int  # position of the first token within the choice's output
    tokens: Sequence[int]
    finish: int = Finish.NONE
    stop_token: int = -1  # the end or stop token that ended it; that token is not in `tokens`
    logprobs: Sequence[Logprob] = ()  # one per token when asked


class Scheduled(msgspec.Struct, frozen=True, array_like=True, tag="scheduled"):
    """The request entered its first step."""

    key: int
    queue_ms: float
    cached_tokens: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """All choices ended; blocks are free. Durations of this execution only."""

    key: int
    queue_ms: float
    prefill_ms: float  # scheduled → first token
    decode_ms: float  # first token → last token
    steps: int
    cached_tokens: int
    preemptions: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request ended badly; blocks are free. `reason` is a `shared.errors.Reason` name."""

    key: int
    reason: str
    message: str
    retryable: bool
    work_done: bool


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    """A cancelled request holds nothing any more, as of `step` (said for unknown keys too)."""

    key: int
    step: int


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """One embedding of an `Encode`: float32 little-endian, `dim` numbers; inputs may come in any order.

    The one with `last` is the request's terminal event: no `Finished` follows it.
    """

    key: int
    index: int
    dim: int
    data: bytes
    tokens: int
    last: bool


Event = Scheduled | Finished | Failed | Freed | Encoded


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Absolute load after a step."""

    running: int  # choices scheduled
    waiting: int  # choices admitted but not running
    queued_prefill_tokens: int
    kv_blocks_free: int  # never used or free
    kv_blocks_cached: int  # evictable prefix-cache blocks
    kv_blocks_used: int
    oldest_waiting_ms: float  # since the arrival of the oldest request that was in no step yet and is not paused
    max_step_ms: float  # longest step of the last minute
    preemptions: int  # since start


class StepOut(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one engine step produced (also sent without runs when only events changed). Runs precede events."""

    step: int
    duration_ms: float
    runs: Sequence[Run]
    events: Sequence[Event]
    load: Load
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine is loaded, self-checked and warm."""

    artefact_hash: str
    tokenizer_hash: str
    kernel_mode: str
    path: str  # which numeric path serves, for Describe
    vocab_size: int
    max_context: int
    block_size: int
    kv_blocks: int
    max_seqs: int
    hidden_size: int
    eos_token_ids: Sequence[int]


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Start-up progress, for people who wait."""

    stage: str
    fraction: float


class Tick(msgspec.Struct, frozen=True, array_like=True, tag="tick"):
    """The engine loop is alive (every 250 ms while idle)."""

    step: int
    load: Load


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """The engine cannot go on and exits; named reason for people and for the door."""

    reason: str
    message: str


FromEngine = StepOut | Ready | Progress | Tick | Fault
