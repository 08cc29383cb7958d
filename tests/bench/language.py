"""A made-up language: text of any length, and a tokenizer trained on it, so that no model file is needed.

Deterministic. Words come from syllables, their frequencies from Zipf's law.
"""

from __future__ import annotations

import functools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 8192
EOS = "<|end|>"
_LEXICON = 6000


def text(seed: int, size: int) -> str:
    """About `size` bytes of prose."""
    rng = random.Random(seed)
    words, weights = _lexicon()
    drawn = rng.choices(words, weights, k=size // 5)
    sentences = (drawn[start : start + 12] for start in range(0, len(drawn), 12))
    return " ".join(" ".join(sentence).capitalize() + "." for sentence in sentences)[:size]


@functools.cache
def tokenizer_json() -> bytes:
    """Byte-level BPE with VOCAB tokens; the last one is EOS."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 1, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    made.train_from_iterator((text(seed, 20_000) for seed in range(50)), trainer)
    filler = [f"<|{index}|>" for index in range(made.get_vocab_size(), VOCAB - 1)]
    made.add_special_tokens([*filler, EOS])
    return made.to_str().encode()


@functools.cache
def _lexicon() -> tuple[list[str], list[float]]:
    rng = random.Random(0)
    syllables = [head + vowel + tail for head in "bdfgklmnprstvz" for vowel in "aeiou" for tail in ("", "n", "r", "s")]
    words = sorted({"".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(2 * _LEXICON)})[:_LEXICON]
    rng.shuffle(words)
    return words, [1 / rank for rank in range(2, len(words) + 2)]
