"""Replaying an artefact's golden vectors on a live model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch
from workers.models.loader import Model
from workers.weights.golden import MARGIN, Comparison, Golden, relative_error
from workers.weights.load import Progress, no_progress


def replay(model: Model, golden: Golden, progress: Progress = no_progress) -> Comparison:
    """Teacher-force the golden tokens through `model` and compare by the margin rule of the served precision."""
    precision = "fp32" if model.dtype is torch.float32 else "bf16"
    clear = differing = 0
    errors: list[float] = []
    for index, prompt in enumerate(golden.prompts):
        logits = score(model, prompt.tolist(), golden.tokens[index].tolist())
        above = golden.margins[index] > MARGIN[precision]
        clear += int(above.sum())
        differing += int((above & (logits.argmax(-1) != golden.tokens[index])).sum())
        for place, (owner, step) in enumerate(golden.places.tolist()):
            if owner == index:
                errors.append(float(relative_error(logits[step], golden.logits[place])))
        progress("golden vectors", (index + 1) / len(golden.prompts))
    return Comparison(golden.tokens.numel(), clear, differing, max(errors), precision)


def score(model: Model, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Logits that choose each of `output`'s tokens after `prompt`, in one prefill: fp32 [len(output), V]."""
    tokens = [*prompt, *output[:-1]]
    batch, kv = single_sequence(model, tokens)
    return model.logits(model.forward(batch, kv)[len(prompt) - 1 :]).cpu()


def single_sequence(model: Model, tokens: Sequence[int]) -> tuple[RaggedBatch, KVCache]:
    """One whole sequence as a batch of one span, with a cache of its own."""
    count, blocks = len(tokens), -(-len(tokens) // BLOCK_SIZE)
    config = model.config

    def ids(values: Sequence[int] | range) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=model.device)

    batch = RaggedBatch(
        tokens=ids(tokens),
        positions=ids(range(count)),
        slots=ids(range(count)),
        query_starts=ids([0, count]),
        context_lens=ids([count]),
        block_tables=ids(range(blocks))[None, :],
        logit_rows=ids(range(count)),
    )
    return batch, KVCache.zeros(config.layers, blocks, config.kv_heads, config.head_dim, model.dtype, model.device)
