"""The whole engine on a GPU: graphs repeat what they recorded, and greedy text is the CPU's by the margin rule.

The model is SmolLM2 where it was fetched, else a few random layers of its shape.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from shared.clock import SYSTEM_CLOCK
from workers.engine import messages as m
from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch
from workers.engine.device import CudaDevice
from workers.engine.gpu_runner import BUCKETS
from workers.engine.options import EngineOptions
from workers.engine.process import start
from workers.models.loader import Model, load_model
from workers.weights.golden import MARGIN, top2_margin
from workers.weights.random_model import make_random
from workers.weights.replay import score

FETCHED = Path(__file__).parents[2] / ".trunkline/models/smollm2-135m-instruct"
TOKENS = 32

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if FETCHED.exists():
        return FETCHED
    directory = tmp_path_factory.mktemp("model") / "random"
    make_random(directory, "135m", layers=4)
    return directory


@pytest.fixture(scope="module")
def model(artefact: Path) -> Model:
    loaded = load_model(artefact, kernel_mode="fused", threads=8, device="cuda")
    assert loaded.kernel_mode == "fused", "the CUDA kernels did not pass their check"
    return loaded


class Talk:
    """Both ends of an engine's mailbox, in this process."""

    def __init__(self, artefact: Path, **options: int | float | str) -> None:
        self.said: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[m.Logprob]] = defaultdict(list)
        self.open: set[int] = set()
        self.load: m.Load | None = None
        self._frames: list[bytes] = []
        chosen = EngineOptions(
            model=str(artefact),
            device="cuda",
            kernel_mode="fused",
            **{"max_seqs": 64, "max_batch_tokens": 512, **options},
        )
        self.engine = start(chosen, self, self, SYSTEM_CLOCK)  # type: ignore[arg-type]

    def recv_all(self, timeout_s: float) -> list[bytes]:
        taken, self._frames = self._frames, []
        return taken

    def send(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Ready):
            assert message.kernel_mode == "fused"
        if not isinstance(message, m.StepOut):
            return
        self.load = message.load
        for run in message.runs:
            self.said[run.key].extend(run.tokens)
            self.logprobs[run.key].extend(run.logprobs)
        for event in message.events:
            assert not isinstance(event, m.Failed), event
            if isinstance(event, m.Finished | m.Freed):
                self.open.discard(event.key)

    def say(self, message: m.ToEngine) -> None:
        self._frames.append(msgspec.msgpack.encode(message))
        if isinstance(message, m.Admit):
            self.open.add(message.key)

    def finish(self) -> None:
        while self.open:
            self.engine.step()


def admit(key: int, prompt: Sequence[int], sampling: m.Sampling, tokens: int = TOKENS) -> m.Admit:
    return m.Admit(key, m.pack_tokens(prompt), [m.ChoiceIn(0)], sampling, tokens, min_tokens=tokens, ignore_eos=True)


def prompts(count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 15, 16, 17, 40, 130, 200]) for _ in range(count)]
    return [[rng.randrange(5, vocabulary - 100) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("rows", [rows for rows in BUCKETS if rows <= 128])
def test_a_graph_repeats_what_runs_without_one(model: Model, rows: int) -> None:
    config, width = model.config, 6
    device = CudaDevice(model.device, SYSTEM_CLOCK)
    cache = KVCache.zeros(config.layers, rows * width, config.kv_heads, config.head_dim, model.dtype, model.device)
    cache.keys.normal_()
    cache.values.normal_()
    generator = torch.Generator().manual_seed(rows)
    lens = torch.randint(1, width * BLOCK_SIZE + 1, (rows,), generator=generator)
    tables = torch.randperm(rows * width, generator=generator).view(rows, width)
    slots = tables.gather(1, ((lens - 1) // BLOCK_SIZE)[:, None])[:, 0] * BLOCK_SIZE + (lens - 1) % BLOCK_SIZE
    tokens = torch.randint(config.vocab_size, (rows,), generator=generator)
    whole = torch.arange(rows + 1)
    numbers = (tokens, lens - 1, slots, whole, lens, tables, whole[:rows])
    batch = RaggedBatch(*(each.to(model.device, torch.int32) for each in numbers))
    eager = model.logits(model.forward(batch, cache)).clone()

    def run() -> tuple[torch.Tensor]:
        return (model.logits(model.forward(batch, cache)),)

    replay, (logits,) = device.capture(run)
    for _ in range(3):
        logits.fill_(torch.nan)
        replay()
        torch.cuda.synchronize()
        assert torch.equal(logits, eager)
    batch.tokens.copy_(batch.tokens.roll(1))  # a graph reads what is there when it is replayed
    replay()
    torch.cuda.synchronize()
    assert rows == 1 or not torch.equal(logits, eager)
    assert torch.equal(logits, model.logits(model.forward(batch, cache)))


def test_greedy_text_is_the_cpus_by_the_margin_rule(artefact: Path, model: Model) -> None:
    talk = Talk(artefact)
    asked = prompts(48, model.config.vocab_size)
    for key, prompt in enumerate(asked):
        talk.say(admit(key, prompt, m.Sampling()))
    talk.finish()
    cpu = load_model(artefact, kernel_mode="fused", threads=8)
    clear = differing = 0
    for key, prompt in enumerate(asked):
        assert len(talk.said[key]) == TOKENS
        logits = score(cpu, prompt, talk.said[key])
        above = top2_margin(logits) > MARGIN["bf16"]
        clear += int(above.sum())
        differing += int((above & (logits.argmax(-1) != torch.tensor(talk.said[key]))).sum())
    assert clear > 100, "the prompts say too little"
    assert differing == 0, f"{differing} of {clear} clear positions differ"


def test_drawn_tokens_edits_and_log_probabilities_are_those_of_the_cpu_sampler(artefact: Path, model: Model) -> None:
    """The sampler's own test is exact; here its arguments are: every edit shows in what is said."""
    talk = Talk(artefact)
    ways = [
        m.Sampling(temperature=0.8, seed=3, logprobs=5),
        m.Sampling(temperature=1.0, top_k=1, seed=4),  # greedy by another way
        m.Sampling(),
        m.Sampling(logit_bias={7: 1e4}),
        m.Sampling(repetition_penalty=1e4, logprobs=0),
    ]
    prompt = prompts(1, model.config.vocab_size, seed=9)[0]
    for key, sampling in enumerate(ways):
        talk.say(admit(key, prompt, sampling))
    talk.finish()
    assert talk.said[1] == talk.said[2]
    assert talk.said[3] == [7] * TOKENS
    assert len(set(talk.said[4])) == TOKENS, "a token came twice against a prohibitive penalty"
    for logprob in talk.logprobs[0]:
        assert len(logprob.top_ids) == 5
        assert logprob.chosen <= logprob.top[0] <= 0.0
        assert list(logprob.top) == sorted(logprob.top, reverse=True)


def test_random_cancels_leave_nothing_behind(artefact: Path, model: Model) -> None:
    """INV-4 is asserted by the engine after every step."""
    talk = Talk(artefact, kv_blocks=400, max_context=1024)
    rng = random.Random(1)
    waiting = list(enumerate(prompts(300, model.config.vocab_size, seed=1)))
    while waiting or talk.open:
        while waiting and len(talk.open) < 100:
            key, prompt = waiting.pop()
            talk.say(admit(key, prompt, m.Sampling(temperature=rng.choice([0.0, 0.7]), seed=key), rng.randint(1, 60)))
        if talk.open and rng.random() < 0.3:
            talk.say(m.Cancel(rng.choice(sorted(talk.open))))
        talk.engine.step()
    assert talk.load is not None
    assert (talk.load.running, talk.load.waiting, talk.load.kv_blocks_used) == (0, 0, 0)
