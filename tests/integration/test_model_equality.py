"""The default model answers as transformers does on the same weights, and a model that is wrong does not.

The reference runs here, live: transformers in fp32, greedy, on 32 prompts × 64 tokens. Ours is teacher-forced on its
tokens through the paged cache. Every deliberate mistake goes through the same comparison and must fail it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch
from workers.models.config import ModelConfig, read_config
from workers.models.fused import FusedOps
from workers.models.llama import Llama, LlamaLayer
from workers.models.loader import load_model
from workers.models.ops import Ops
from workers.models.rope import RopeTable
from workers.models.standard import StandardOps
from workers.weights.golden import MARGIN, Comparison, greedy, load_golden, reference_model, relative_error, top2_margin
from workers.weights.load import check_texts, load_weights
from workers.weights.manifest import GOLDEN, TOKENIZER, read_manifest
from workers.weights.replay import replay

pytestmark = pytest.mark.timeout(300)

TOKENS = 64
PROMPTS = (
    "The capital of France is", "The capital of Japan is", "The largest planet in our solar system is",
    "Water boils at a temperature of", "Once upon a time, in a small village by the sea,",
    "The three primary colours are red,", "A recipe for pancakes: first,", "def fibonacci(n):\n    if n < 2:\n",
    "import numpy as np\n\ndef softmax(x):\n", "In 1969, astronauts landed on", "The chemical symbol for gold is",
    "1, 2, 3, 4, 5, 6, 7,", "Monday, Tuesday, Wednesday,", "The opposite of hot is", "To be, or not to be,",
    "The sum of two and two is", "Dear Sir or Madam,\n\nI am writing to", "Photosynthesis is the process by which",
    "The mitochondria is the", "A triangle has three", "The first president of the United States was",
    "She opened the door and saw", "The weather today is", "My favourite book is", "The quick brown fox jumps over",
    "List three fruits:\n1.", "Q: What is the speed of light?\nA:", "Translate to French: Good morning.\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nCount from one to ten.<|im_end|>\n<|im_start|>assistant\n",
    "The history of computing began with machines that could do arithmetic. Charles Babbage designed one of the first, "
    "and Ada Lovelace wrote what many call the first program for it. A century later, electronic computers",
)  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """What transformers says: prompts, its greedy tokens [n, TOKENS], and all their logits [n, TOKENS, V]."""

    prompts: Sequence[Sequence[int]]
    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Parts:
    """What models are built from here."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def parts(artefact_dir: Path) -> Parts:
    manifest = read_manifest(artefact_dir)
    config = check_texts(artefact_dir, manifest)
    return Parts(config, dict(load_weights(artefact_dir, manifest, config, 2).tensors))


@pytest.fixture(scope="module")
def reference(artefact_dir: Path, parts: Parts) -> Reference:
    tokenizer = Tokenizer.from_file(str(artefact_dir / TOKENIZER))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    raw = json.loads((artefact_dir / "config.json").read_text())
    tokens, logits = greedy(reference_model(raw, parts.weights), prompts, TOKENS)
    return Reference(prompts, tokens, logits)


def teacher_forced(model: Llama, reference: Reference, index: int) -> torch.Tensor:
    """Logits that choose each of the reference's tokens: the prompt in two chunks, then ragged, then one by one."""
    prompt = reference.prompts[index]
    tokens = [*prompt, *reference.tokens[index].tolist()][:-1]
    blocks = -(-len(tokens) // BLOCK_SIZE)
    config = model.config
    kv = KVCache.zeros(config.layers, blocks, config.kv_heads, config.head_dim, model.dtype, model.device)
    cuts = [0, len(prompt) // 2 or 1, len(prompt) + 20, len(tokens) - 3, len(tokens) - 2, len(tokens) - 1, len(tokens)]
    rows = [model.forward(_chunk(tokens, first, last, blocks), kv) for first, last in pairwise(cuts)]
    return model.logits(torch.cat(rows)[len(prompt) - 1 :])


def _chunk(tokens: Sequence[int], first: int, last: int, blocks: int) -> RaggedBatch:
    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    table = list(reversed(range(blocks)))
    positions = range(first, last)
    return RaggedBatch(
        tokens=ints(tokens[first:last]),
        positions=ints(list(positions)),
        slots=ints([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]),
        query_starts=ints([0, last - first]),
        context_lens=ints([last]),
        block_tables=ints([table]),
        logit_rows=ints([last - first - 1]),
    )


def compare(model: Llama, reference: Reference, prompts: Sequence[int]) -> Comparison:
    """The margin rule of `workers.weights.golden.Comparison` over some of the prompts."""
    positions = clear = differing = 0
    worst = 0.0
    for index in prompts:
        ours, theirs = teacher_forced(model, reference, index), reference.logits[index]
        above = top2_margin(theirs) > MARGIN["fp32"]
        positions += len(theirs)
        clear += int(above.sum())
        differing += int((above & (ours.argmax(-1) != reference.tokens[index])).sum())
        errors = relative_error(ours, theirs)
        worst = float("nan") if bool(errors.isnan().any()) else max(worst, float(errors.max()))
    return Comparison(positions, clear, differing, worst)


OPS: dict[str, Callable[[], Ops]] = {
    "fused": lambda: FusedOps(2),
    "standard": lambda: StandardOps(torch.device("cpu")),
}


# The reference path takes as long as transformers itself: a quarter of the prompts is enough to hold it to the rule.
@pytest.mark.parametrize(("path", "count"), [("fused", 32), ("standard", 8)])
def test_greedy_answers_and_logits_are_those_of_transformers(
    path: str, count: int, parts: Parts, reference: Reference
) -> None:
    prompts = range(0, len(PROMPTS), len(PROMPTS) // count)
    result = compare(Llama(parts.config, OPS[path](), parts.weights), reference, prompts)
    assert result.positions == count * TOKENS
    assert result.fit, result
    assert result.passed, result


class Wrapped:
    """Operators with one thing wrong; everything else is passed on."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class SeesOneKeyTooFew(Wrapped):
    """The causal mask is off by one: a query does not see itself."""

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        earlier = replace(batch, positions=(batch.positions - 1).clamp(min=0))
        return self._ops.attention(qkv, earlier, keys, values, scale)


class SeesOneKeyTooMany(Wrapped):
    """The causal mask is off by one: a query sees the token it should predict."""

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        later = torch.minimum(batch.positions + 1, batch.context_lens[0] - 1)
        return self._ops.attention(qkv, replace(batch, positions=later), keys, values, scale)


class TiledGroups(Wrapped):
    """Query head h reads kv head h % kv_heads, as if kv heads were tiled and not repeated."""

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        order = torch.arange(heads).view(-1, kv_heads).T.flatten()  # heads that tiling gives to kv head 0, then 1, …
        split = qkv.view(len(qkv), -1, head_dim)
        moved = torch.cat([split[:, order], split[:, heads:]], dim=1).flatten(1)
        out = self._ops.attention(moved, batch, keys, values, scale).view(len(qkv), heads, head_dim)
        return out[:, order.argsort()].flatten(1).contiguous()


class PostNormLayer(LlamaLayer):
    """Normalises after each part and not before."""

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, batch: RaggedBatch, kv: KVCache, table: RopeTable
    ) -> torch.Tensor:
        eps = self.config.rms_eps
        if delta is not None:
            x.add_(delta)
        x.add_(self.ops.rms_norm(self.attend(x.clone(), batch, kv, table), self.input_norm, eps))
        return self.ops.rms_norm(self.feed_forward(x.clone()), self.post_norm, eps)


class PostNorm(Llama):
    layer_class = PostNormLayer


def halved_frequencies(parts: Parts, ops: Ops) -> Llama:
    model = Llama(parts.config, ops, parts.weights)
    angles = torch.atan2(model.table.sin.double(), model.table.cos.double())
    positions = torch.arange(parts.config.max_context, dtype=torch.float64)[:, None]
    frequencies = angles[1] / 2
    model.table = RopeTable((positions * frequencies).cos().float(), (positions * frequencies).sin().float())
    return model


MUTATIONS: dict[str, Callable[[Parts, Ops], Llama]] = {
    "rotary frequencies halved": halved_frequencies,
    "mask one key short": lambda parts, ops: Llama(parts.config, SeesOneKeyTooFew(ops), parts.weights),
    "mask one key long": lambda parts, ops: Llama(parts.config, SeesOneKeyTooMany(ops), parts.weights),
    "kv heads tiled": lambda parts, ops: Llama(parts.config, TiledGroups(ops), parts.weights),
    "norm after each part": lambda parts, ops: PostNorm(parts.config, ops, parts.weights),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_model_with_one_mistake_is_caught_on_a_single_prompt(
    mutation: str, parts: Parts, reference: Reference
) -> None:
    ops = FusedOps(2)
    assert compare(Llama(parts.config, ops, parts.weights), reference, [4]).passed
    result = compare(MUTATIONS[mutation](parts, ops), reference, [4])
    assert not result.passed, f"{mutation} was not caught: {result}"
    assert result.differing or not result.max_error <= 1e-3, f"{mutation} was hardly seen: {result}"


def test_the_golden_vectors_of_the_artefact_are_answered(artefact_dir: Path) -> None:
    model = load_model(artefact_dir, kernel_mode="fused", threads=2)
    assert model.kernel_mode == "fused"
    assert replay(model, load_golden(artefact_dir / GOLDEN)).passed


def test_known_answers_come_out_word_for_word(artefact_dir: Path, reference: Reference) -> None:
    tokenizer = Tokenizer.from_file(str(artefact_dir / TOKENIZER))
    eos = read_config(artefact_dir).eos_token_ids[0]

    def answer(index: int) -> str:
        ids = reference.tokens[index].tolist()
        return tokenizer.decode(ids[: ids.index(eos)])

    assert answer(0) == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
    assert answer(PROMPTS.index(next(p for p in PROMPTS if "What is the capital of France" in p))) == (
        "The capital of France is Paris."
    )
