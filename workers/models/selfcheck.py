"""Do two models on the same weights answer alike? Asked before the faster one may serve.

The one rule: the check runs every operator the way serving does: a ragged prefill whose sequences end inside a page,
then a decode step on the pages it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch
from workers.models.config import ModelConfig

LENGTHS = (37, 1, 20)  # tokens of each sequence: across pages, a single one, and in between
SEED = 20240607


class Runnable(Protocol):
    """What the check needs of a model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def largest_difference(ours: Runnable, reference: Runnable) -> float:
    """Largest relative logit error ‖a − b‖₂ / ‖b‖₂ over random tokens: a prefill and a decode step. NaN stays NaN."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = [_random_ids(count, ours.config.vocab_size, generator) for count in (*LENGTHS, len(LENGTHS))]
    errors = [
        (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
        for a, b in zip(_run(ours, tokens), _run(reference, tokens), strict=True)
    ]
    return float(torch.cat(errors).max())


def _random_ids(count: int, vocabulary: int, generator: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(vocabulary, (count,), generator=generator).tolist()
    return ids


def _run(model: Runnable, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of every prompt position, then of one further token per sequence."""
    config, pages = model.config, [-(-(count + 1) // BLOCK_SIZE) for count in LENGTHS]
    kv = KVCache.zeros(config.layers, sum(pages), config.kv_heads, config.head_dim, model.dtype, model.device)
    prompts = _batch(tokens[:-1], [0] * len(LENGTHS), pages, model.device)
    decode = _batch([[token] for token in tokens[-1]], LENGTHS, pages, model.device)
    return [model.logits(model.forward(batch, kv)) for batch in (prompts, decode)]


def _batch(
    tokens: Sequence[Sequence[int]], starts: Sequence[int], pages: Sequence[int], device: torch.device
) -> RaggedBatch:
    tables = [list(range(sum(pages[:span]), sum(pages[: span + 1]))) for span in range(len(pages))]
    positions = [range(start, start + len(span)) for start, span in zip(starts, tokens, strict=True)]
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, span in zip(tables, positions, strict=True)
        for position in span
    ]
    ends = [sum(len(span) for span in tokens[: count + 1]) for count in range(len(tokens))]

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return RaggedBatch(
        tokens=ints([token for span in tokens for token in span]),
        positions=ints([position for span in positions for position in span]),
        slots=ints(slots),
        query_starts=ints([0, *ends]),
        context_lens=ints([span.stop for span in positions]),
        block_tables=torch.tensor(
            [[*table, *[0] * (max(pages) - len(table))] for table in tables], dtype=torch.int32, device=device
        ),
        logit_rows=ints([end - 1 for end in ends]),
    )
