"""Text from tokens: joined pushes are the whole decode, and stops cut the same text however it is split."""

from __future__ import annotations

import functools
import random
import unicodedata
from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from gateway.tokens import Detokenizer, StopMatcher, Tokenizer

REAL_TEXTS = [
    "Hello, world! It's 12:30 — don't be late.",
    "日本語のテキストと、中文文本，한국어 텍스트.",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 🏳️‍🌈, 👍🏽 thumbs",
    unicodedata.normalize("NFD", "Ångström café naïve e\u0301\u0323 Z̸̡̛a̴l̵g̶o"),
    "  leading and   inner spaces\n\n\ttabs \r\n end ",
    "नमस्ते दुनिया مرحبا بالعالم שלום עולם",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓁐 \u200b\ufeff\u202e\x00\x7f",
    "",
]
CORPUS = REAL_TEXTS * 4 + ["the quick brown fox jumps over the lazy dog"] * 20


@functools.cache
def byte_level() -> Tokenizer:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    model.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("   ", normalized=False)])
    return Tokenizer(model.to_str().encode())


@functools.cache
def byte_fallback() -> Tokenizer:
    """In the form of Llama 2: SentencePiece's marks, bytes for what is not in the vocabulary."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "he", "▁th", "▁the", "é", "日", "▁▁"]
    merges = [("t", "h"), ("h", "e"), ("▁", "th"), ("▁th", "e"), ("▁", "▁")]
    model = tokenizers.Tokenizer(
        models.BPE({token: place for place, token in enumerate(vocab)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    model.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(model.to_str().encode())


@functools.cache
def metaspace() -> Tokenizer:
    model = tokenizers.Tokenizer(models.Unigram())
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], unk_token="<pad>", show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    return Tokenizer(model.to_str().encode())


@functools.cache
def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "qu", "##ick", "fox", ".", ",", "do", "not", "'", "s", "##s", "n't", "é"]
    model = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    model.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return Tokenizer(model.to_str().encode())


@functools.cache
def without_decoder() -> Tokenizer:
    model = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    return Tokenizer(model.to_str().encode())


KINDS = [byte_level, byte_fallback, metaspace, word_piece, without_decoder]


def theirs(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> str:
    text: str = tokenizer._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
    return text


def pushed(tokenizer: Tokenizer, ids: Sequence[int], sizes: random.Random, **how: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **how)
    pieces, place = [], 0
    while place < len(ids):
        size = sizes.randint(0, 3)
        pieces.append(detokenizer.push(ids[place : place + size]))
        place += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.randoms(use_true_random=False), skip=st.booleans(), after=st.booleans())
def test_pushes_of_random_ids_join_to_the_decode_of_all(
    kind: Callable[[], Tokenizer], data: st.DataObject, sizes: random.Random, skip: bool, after: bool
) -> None:
    tokenizer = kind()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    pieces = pushed(tokenizer, ids, sizes, skip_special=skip, after_text=after)
    assert "".join(pieces) == tokenizer.decode(ids, skip, after)
    assert all(not piece.endswith("\ufffd") or tokenizer.decode(ids, skip, after).count("\ufffd") for piece in pieces)


@pytest.mark.parametrize("kind", [byte_level, metaspace, word_piece, without_decoder])
@settings(max_examples=80, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_of_random_ids_equals_the_library(
    kind: Callable[[], Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = kind()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(ids, skip) == theirs(tokenizer, ids, skip)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_with_byte_fallback_equals_the_library_up_to_how_often_it_says_not_utf8(
    data: st.DataObject, skip: bool
) -> None:
    tokenizer = byte_fallback()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    ours, other = tokenizer.decode(ids, skip), theirs(tokenizer, ids, skip)
    if "\ufffd" in other:
        assert "\ufffd" in ours  # the library gives up a whole run of bytes for one bad byte in it
    else:
        assert ours == other


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", REAL_TEXTS)
def test_real_text_comes_back_token_by_token_without_replacement(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(text, special=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=60), sizes=st.randoms(use_true_random=False))
@example(text="\U0010ffff", sizes=random.Random(0))
def test_any_text_survives_encode_and_streamed_decode(text: str, sizes: random.Random) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, special=False)
    assert "".join(pushed(tokenizer, ids, sizes, skip_special=False)) == text


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_completion_joins_on_to_its_prompt(data: st.DataObject) -> None:
    tokenizer = byte_fallback()
    words = st.lists(st.sampled_from(["the", "he", "x", "日", "é", "🎉"]), min_size=1, max_size=6)
    prompt, completion = " ".join(data.draw(words)), " " + " ".join(data.draw(words))
    ids = tokenizer.encode(prompt + completion)
    cut = data.draw(st.integers(1, len(ids)))
    head = tokenizer.decode(ids[:cut])
    if "\ufffd" not in head:
        assert head + tokenizer.decode(ids[cut:], after_text=True) == prompt + completion


def cut_at_first_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The plain definition: the stop that completes first, the longest of those."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=250, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 4), min_size=40, max_size=40),
    include=st.booleans(),
)
@example(text="aababab", stops=["abab", "babx"], sizes=[1] * 40, include=False)
def test_stops_cut_the_same_text_however_it_is_split(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    shown, place, matched = "", 0, None
    for size in [*sizes, 40]:
        piece, matched = matcher.push(text[place : place + size])
        shown += piece
        place += size
        if matched is not None:
            break
        consumed = text[:place]
        held = consumed[len(shown) :]
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((suffix for suffix in prefixes if consumed.endswith(suffix)), key=len, default="")
        assert held == longest, "held back other than the longest suffix that may become a stop"
    expected, stop = cut_at_first_stop(text, stops, include)
    assert (shown + matcher.finish(), matched) == (expected, stop)
