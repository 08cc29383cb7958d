"""Building `tokenizer.json` from the vocabulary inside a GGUF file.

The one rule: only pre-tokenisers whose every split is known here are accepted; a near miss tokenises digits or
spaces differently and quietly spoils every answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.weights.gguf import GGUFError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
PRE_TOKENIZERS = ("smollm",)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer a GGUF file describes; raises GGUFError if it is of another kind."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise GGUFError(
            f"the file's tokenizer ({model!r}, pre-tokeniser {pre!r}) is not supported "
            f"(supported: 'gpt2' with {', '.join(PRE_TOKENIZERS)}); convert from the Hugging Face directory instead"
        )
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    kinds = _list(metadata, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in _list(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # Every digit on its own, then the classic byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([_added(token) for token, kind in added if kind == _USER_DEFINED])
    tokenizer.add_special_tokens([_added(token) for token, kind in added if kind == _CONTROL])
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise GGUFError(f"the file has no {key}")
    return value
