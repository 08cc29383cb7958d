"""On the real model, no bit of a request's scores depends on what shares its steps, its chunks, its cache or its fate.

Every row of logits that a token was drawn from is compared by its bytes with those of the same request alone, cold and
in large chunks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.engine_rig import Notebook
from workers.engine import messages as m
from workers.engine.batch import KVCache, RaggedBatch
from workers.engine.blocks import BlockPool
from workers.engine.engine import Engine, Vocabulary
from workers.engine.runner import Output, Runner
from workers.engine.sampler import Draw
from workers.engine.scheduler import Limits, Plan, Scheduler
from workers.engine.step import Computed
from workers.models.loader import Model, load_model

SHARED = b"s" * 32
RNG = random.Random(7)
STEM = [RNG.randrange(20, 49_000) for _ in range(48)]
PROMPTS = [
    [504],
    STEM[:16],
    [*STEM[:33], 17],
    [*STEM, *(RNG.randrange(20, 49_000) for _ in range(29))],
    [RNG.randrange(20, 49_000) for _ in range(30)],
]
KINDS = [
    m.Sampling(logprobs=3),
    m.Sampling(temperature=0.9, top_p=0.9, seed=11),
    m.Sampling(temperature=1.2, top_k=50, repetition_penalty=1.1, seed=12),
]
TOKENS = 5


def work(key: int, *, scope: bytes = b"", choices: tuple[int, ...] = (0,)) -> m.Admit:
    """Request `key`: prompt and sampling follow from it."""
    prompt, sampling = PROMPTS[key % len(PROMPTS)], KINDS[key % len(KINDS)]
    fresh = [m.ChoiceIn(index) for index in choices]
    return m.Admit(key, m.pack_tokens(prompt), fresh, sampling, TOKENS, ignore_eos=True, cache_scope=scope)


class Recorder(Runner):
    """A runner that keeps the bytes of every row of logits, by (key, choice, place in the sequence)."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        super().__init__(model, cache)
        self.rows: dict[tuple[int, int, int], bytes] = {}
        self._plan = Plan(())

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> Computed:
        self._plan = plan
        return super().launch(plan, draws)

    def forward(self, batch: RaggedBatch) -> Output:
        output = super().forward(batch)
        for sequence, row in zip(self._plan.sampled, output.logits, strict=True):
            self.rows[sequence.request.key, sequence.choice, sequence.length] = row.numpy().tobytes()
        return output


class Bench:
    """One engine over the model, with its own pool."""

    def __init__(self, model: Model, blocks: int = 64, batch_tokens: int = 256, seqs: int = 8) -> None:
        config = model.config
        cache = KVCache.zeros(config.layers, blocks, config.kv_heads, config.head_dim, model.dtype, model.device)
        cache.keys.fill_(float("nan"))  # what was never written must never be read
        cache.values.fill_(float("nan"))
        self.recorder = Recorder(model, cache)
        self.scheduler = Scheduler(Limits(batch_tokens, seqs, 64, 512), BlockPool(blocks))
        self.notes = Notebook()
        self.queue: list[m.ToEngine] = []
        vocabulary = Vocabulary(config.vocab_size, config.eos_token_ids)
        self.engine = Engine(vocabulary, self.scheduler, self.recorder, FakeClock(), self, self.notes)

    def receive(self, timeout_s: float) -> list[m.ToEngine]:
        taken, self.queue = self.queue, []
        return taken

    def run(self, *messages: m.ToEngine) -> None:
        """Everything at once, to the end."""
        self.queue.extend(messages)
        while self.engine.step():
            pass


@pytest.fixture(scope="module", params=[("standard", 1), ("fused", 2)], ids=["standard", "fused"])
def model(request: pytest.FixtureRequest, artefact_dir: Path) -> Model:
    kernel_mode, threads = request.param
    loaded = load_model(artefact_dir, kernel_mode=kernel_mode, threads=threads)
    if loaded.kernel_mode != kernel_mode:
        pytest.skip(f"{kernel_mode} does not serve on this machine")
    assert loaded.invariant
    return loaded


@pytest.fixture(scope="module")
def alone(model: Model) -> Bench:
    """Every request by itself, on an empty pool, in one chunk."""
    whole = Bench(model)
    for key in range(5):
        bench = Bench(model)
        bench.run(work(key))
        whole.recorder.rows |= bench.recorder.rows
        whole.notes.tokens |= bench.notes.tokens
        whole.notes.logprobs |= bench.notes.logprobs
    return whole


def assert_same(bench: Bench, alone: Bench, keys: Iterable[int] = range(5)) -> None:
    for key in keys:
        assert bench.notes.tokens[key, 0] == alone.notes.tokens[key, 0]
        assert bench.notes.logprobs[key, 0] == alone.notes.logprobs[key, 0]
    differing = [where for where, row in bench.recorder.rows.items() if row != alone.recorder.rows[where]]
    assert not differing, "rows differ in their bits"


def test_all_in_one_batch_and_in_odd_chunks(model: Model, alone: Bench) -> None:
    bench = Bench(model, batch_tokens=13)
    bench.run(*map(work, range(5)))
    assert_same(bench, alone)


def test_a_warm_prefix_cache(model: Model, alone: Bench) -> None:
    bench = Bench(model, batch_tokens=64)
    for key in (3, 2, 1, 0, 4):
        bench.run(work(key, scope=SHARED))
    assert bench.notes.scheduled[2].cached_tokens == 32
    assert_same(bench, alone)


def test_preemption_and_pause(model: Model, alone: Bench) -> None:
    bench = Bench(model, blocks=7, batch_tokens=32)
    bench.queue.extend(map(work, (1, 4, 2)))
    for _ in range(2):
        bench.engine.step()
    bench.queue.append(m.Pause(4, True))
    bench.engine.step()
    bench.queue.append(m.Pause(4, False))
    bench.run(work(3), work(0))
    assert_same(bench, alone)


def test_preemption_in_a_pool_that_is_too_small(model: Model, alone: Bench) -> None:
    bench = Bench(model, blocks=4, batch_tokens=32)
    bench.run(work(1), work(4))
    assert bench.scheduler.preemptions > 0
    assert_same(bench, alone, (1, 4))


def test_choices_that_share_a_prompt(model: Model, alone: Bench) -> None:
    bench = Bench(model, batch_tokens=40)
    bench.run(work(3, choices=(0, 1)), work(1))
    assert bench.notes.tokens[3, 0] == alone.notes.tokens[3, 0] == bench.notes.tokens[3, 1]  # greedy
    assert bench.notes.tokens[1, 0] == alone.notes.tokens[1, 0]
    last = len(PROMPTS[3]) + TOKENS - 1
    assert bench.recorder.rows[3, 1, last] == alone.recorder.rows[3, 0, last]


def test_embeddings_in_any_chunks_and_company(model: Model) -> None:
    inputs = [m.pack_tokens(prompt) for prompt in PROMPTS]
    calm, busy = Bench(model), Bench(model, batch_tokens=11, blocks=12)
    for index, data in enumerate(inputs):
        calm.run(m.Encode(index, [data]))
    busy.run(m.Encode(100, inputs), work(0), work(1))
    for index in range(len(inputs)):
        assert busy.notes.vectors[100][index].data == calm.notes.vectors[index][0].data
