"""The sampler against transformers' own warpers and against a brute-force float64 definition."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.messages import Sampling
from workers.engine.philox import uniform
from workers.engine.sampler import Draw, Pick, choose, edit, kept, raw_logprobs, sample

Floats = npt.NDArray[np.float32]


def draw(sampling: Sampling, tokens: list[int], prompt: int = 0, choice: int = 0, banned: tuple[int, ...] = ()) -> Draw:
    return Draw(sampling, np.array(tokens, np.int32), prompt, choice, banned)


def brute_force(scores: Floats, sampling: Sampling) -> dict[int, float]:
    """Kept ids and their probabilities by the definitions, in float64 and plain Python; ties keep the lowest id."""
    values = {token: float(score) for token, score in enumerate(scores)}
    if 0 < sampling.top_k < len(values):
        least = sorted(values.values(), reverse=True)[sampling.top_k - 1]
        values = {token: score for token, score in values.items() if score >= least}
    top = max(values.values())
    weights = {token: math.exp((score - top) / sampling.temperature) for token, score in values.items()}
    total = math.fsum(weights.values())
    if sampling.top_p < 1.0:
        lightest_first = sorted(weights, key=lambda token: (values[token], -token))
        cumulative = 0.0
        removed = set()
        for token in lightest_first[:-1]:
            cumulative += weights[token] / total
            if cumulative > 1.0 - sampling.top_p:
                break
            removed.add(token)
        weights = {token: weight for token, weight in weights.items() if token not in removed}
    if sampling.min_p > 0.0:
        weights = {token: weight for token, weight in weights.items() if weight >= sampling.min_p}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=60),
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.sampled_from([0, 1, 2, 5, 59, 200]),
    st.sampled_from([1.0, 0.9517, 0.7703, 0.3109, 0.0101, 0.0]),
    st.sampled_from([0.0, 0.013, 0.37, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_what_is_kept_and_what_is_drawn_follow_the_definitions_ties_included(
    eighths: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    scores = np.array(eighths, np.float32) / 8
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    wanted = brute_force(scores, sampling)
    ids, weights = kept(scores, sampling)
    assert ids.tolist() == sorted(wanted)
    assert np.allclose(weights / weights.sum(), [wanted[token] for token in ids.tolist()], rtol=1e-12)
    target, cumulative = uniform(seed, 3, 11), 0.0
    for token in sorted(wanted):
        cumulative += wanted[token]
        if cumulative > target + 1e-12:
            assert choose(scores, sampling, 3, 11) == token
            break
        if cumulative > target - 1e-12:
            break  # the draw falls on a border, where rounding decides


@pytest.mark.parametrize("top_p", [0.9, 0.5, 0.1])
def test_the_nucleus_of_an_almost_flat_distribution_follows_the_definition(top_p: float) -> None:
    scores = np.random.default_rng(0).permutation(400).astype(np.float32) / 1000
    sampling = Sampling(temperature=1.0, top_p=top_p)
    assert kept(scores, sampling)[0].tolist() == sorted(brute_force(scores, sampling))


@pytest.mark.parametrize(("drawn", "token"), [(0.0, 2), (1.0 - 2.0**-53, 4)])
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_possible_token(
    monkeypatch: pytest.MonkeyPatch, drawn: float, token: int
) -> None:
    monkeypatch.setattr("workers.engine.sampler.uniform", lambda *_: drawn)
    scores = np.array([-np.inf, -np.inf, 0.3, 0.1, 0.2, -np.inf], np.float32)
    assert choose(scores, Sampling(temperature=1.0), 0, 0) == token


def test_the_draws_counter_is_the_place_in_the_output_whatever_the_prompt() -> None:
    logits = torch.zeros(1, 1000)
    sampling = Sampling(temperature=1.0, seed=5)
    long, short = draw(sampling, [1] * 30, prompt=27), draw(sampling, [1] * 5, prompt=2)
    assert long.position == short.position == 3
    assert sample(logits, [long]) == sample(logits, [short]) == [Pick(int(uniform(5, 0, 3) * 1000))]


@pytest.mark.parametrize("seed", range(30))
def test_the_kept_set_is_that_of_transformers_warpers_in_their_order(seed: int) -> None:
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(seed)
    scores = (rng.normal(size=300) * 4).astype(np.float32)
    sampling = Sampling(
        temperature=float(rng.choice([0.5, 1.0, 1.7])),
        top_k=int(rng.choice([1, 10, 100])),
        top_p=float(rng.choice([0.2, 0.8, 0.97])),
        min_p=float(rng.choice([0.01, 0.1])),
    )
    warped = torch.from_numpy(scores)[None]
    for warper in (
        hf.TemperatureLogitsWarper(sampling.temperature),
        hf.TopKLogitsWarper(sampling.top_k),
        hf.TopPLogitsWarper(sampling.top_p),
        hf.MinPLogitsWarper(sampling.min_p),
    ):
        warped = warper(torch.zeros(1, 1, dtype=torch.long), warped)
    ids, weights = kept(scores, sampling)
    assert ids.tolist() == warped[0].isfinite().nonzero()[:, 0].tolist()
    assert np.allclose(weights / weights.sum(), warped[0].softmax(-1)[ids].numpy(), rtol=1e-4)


def test_the_repetition_penalty_is_transformers_over_prompt_and_output() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    row = np.random.default_rng(0).normal(size=50).astype(np.float32)
    tokens = [3, 3, 7, 49, 0, 7, 7]
    got = edit(row, draw(Sampling(repetition_penalty=1.3), tokens, prompt=4))
    wanted = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), torch.from_numpy(row.copy())[None])[0]
    assert np.array_equal(got, wanted.numpy())


def test_bias_comes_first_then_repetition_then_frequency_and_presence_over_the_output_only() -> None:
    row = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    sampling = Sampling(
        repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={0: 1.0, 1: -1.0}
    )
    got = edit(row, draw(sampling, [0, 1, 3, 3, 2], prompt=2, banned=(2,)))
    assert got.tolist() == [2.0 / 2, -3.0 * 2, -math.inf, 3.0 / 2 - 2 * 0.25 - 0.5]
    assert row.tolist() == [1.0, -2.0, 0.5, 3.0]


def test_draws_follow_the_distribution() -> None:
    scores = np.log(np.arange(1, 33, dtype=np.float32))
    counts = np.zeros(32)
    for position in range(20_000):
        counts[choose(scores, Sampling(temperature=1.0, seed=9), 0, position)] += 1
    wanted = np.arange(1, 33) / np.arange(1, 33).sum() * 20_000
    assert ((counts - wanted) ** 2 / wanted).sum() < 61.1  # 99.9 % of 31 degrees of freedom


def mixed_draws(rows: int) -> list[Draw]:
    """One draw of every kind, over and over."""
    kinds = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_p=0.9, logprobs=4),
        Sampling(temperature=1.3, top_k=40, min_p=0.02),
        Sampling(repetition_penalty=1.2, logprobs=0),
        Sampling(temperature=0.5, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={5: 3.0}),
    ]
    return [draw(kinds[row % len(kinds)], list(range(20 + row)), 10, choice=row) for row in range(rows)]


def test_a_row_draws_the_same_bits_alone_in_any_batch_and_in_any_place() -> None:
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(0)) * 3
    draws = mixed_draws(12)
    together = sample(logits, draws)
    assert [sample(logits[row : row + 1], draws[row : row + 1])[0] for row in range(12)] == together
    turned = list(reversed(range(12)))
    assert sample(logits[turned], [draws[row] for row in turned]) == [together[row] for row in turned]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_no_token_and_its_neighbours_are_untouched(bad: float) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    draws = mixed_draws(6)
    healthy = sample(logits, draws)
    for row in range(6):
        sick = logits.clone()
        sick[row, 17] = bad
        picks = sample(sick, draws)
        assert picks[row] is None
        assert picks[:row] + picks[row + 1 :] == healthy[:row] + healthy[row + 1 :]


def test_a_row_with_everything_banned_is_no_token() -> None:
    assert sample(torch.zeros(1, 3), [draw(Sampling(), [0], banned=(0, 1, 2))]) == [None]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1e-300),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=0.0),
    ],
)
def test_greedy_and_everything_that_amounts_to_it_take_the_best_token(sampling: Sampling) -> None:
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(2))
    assert sample(logits, [draw(sampling, [1, 2])]) == [Pick(int(logits.argmax()))]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sample(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [draw(Sampling(), [0])]) == [Pick(1)]


def test_log_probabilities_are_of_the_raw_distribution_best_first_with_ties_by_id() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])
    sampling = Sampling(temperature=2.0, top_k=1, repetition_penalty=5.0, logit_bias={4: 100.0}, logprobs=3)
    pick = sample(row, [draw(sampling, [1, 2])])[0]
    assert pick is not None
    assert pick.token == 4
    assert pick.logprob is not None
    exact = torch.log_softmax(row[0].double(), 0)
    assert pick.logprob.chosen == pytest.approx(float(exact[4]), abs=1e-12)
    assert pick.logprob.top_ids == [1, 3, 2]
    assert pick.logprob.top == pytest.approx(exact[[1, 3, 2]].tolist(), abs=1e-12)
    whole = raw_logprobs(row[0].numpy(), 0, 5)
    assert math.fsum(math.exp(value) for value in whole.top) == pytest.approx(1.0, abs=1e-12)


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.tensor([[10.0, 0.0, 0.0]])
    drawn = {
        sample(logits, [draw(Sampling(temperature=1.0), list(range(position)), banned=(0,))])[0]
        for position in range(50)
    }
    assert drawn == {Pick(1), Pick(2)}
