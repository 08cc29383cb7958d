"""What `make bench-mesh` stands on: its verdicts, its language, and that every measure can be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.bench import language
from tests.bench.mesh.__main__ import MEASURES, RESULTS, _arguments
from tests.bench.mesh.row import Row
from tests.fakes.engine import Formula, Pace, Shape
from workers.engine import messages as m


def test_a_row_is_met_on_the_right_side_of_its_target() -> None:
    assert Row("", "", 3.0, 3.0).met
    assert not Row("", "", 3.1, 3.0).met
    assert Row("", "", 3.1, 3.0, "least").met
    assert not Row("", "", 2.9, 3.0, "least").met
    assert Row("", "", 3.0).met is None
    assert Row("", "", None, 3.0).met is None
    assert len(MEASURES) == 9


@pytest.mark.parametrize(
    ("line", "out"),
    [("", RESULTS), ("--only hop edge", None), ("--only hop --out x", Path("x")), ("--out x", Path("x"))],
)
def test_some_measures_alone_do_not_take_the_place_of_the_whole_result(line: str, out: Path | None) -> None:
    assert _arguments(line.split()).out == out


def test_the_language_is_the_same_every_time_and_its_tokenizer_gives_it_back() -> None:
    text = language.text(3, 20_000)
    assert text == language.text(3, 20_000)
    assert text != language.text(4, 20_000)
    assert 15_000 < len(text) <= 20_000
    tokenizer = Tokenizer.from_str(language.tokenizer_json().decode())
    assert tokenizer.get_vocab_size() == language.VOCAB
    assert tokenizer.token_to_id(language.EOS) == language.VOCAB - 1
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert 3 < len(text) / len(ids) < 9, "a token is about a word"


def test_the_latency_models_engine_says_that_a_cancelled_request_is_free_before_its_next_step() -> None:
    formula = Formula(Shape(), Pace())
    for key in (1, 2):
        formula.take(m.Admit(key, m.pack_tokens([5, 6]), [m.ChoiceIn(0)], m.Sampling(), 9, ignore_eos=True))
    formula.step()
    formula.take(m.Cancel(1))
    said = formula.before_step()
    assert said is not None
    assert (said.duration_ms, said.runs, [event.key for event in said.events]) == (0.0, [], [1])
    assert formula.before_step() is None
