"""tl_sample against the engine's sampler: the same ids for the same logits, seed and position."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.sampling_call import UNTOUCHED, SamplingCall, sampling_call
from trunkline_kernels.door import Context, KernelError, sample_struct
from workers.engine.messages import Sampling
from workers.engine.sampler import Draw, Pick, sample

Normal = Callable[..., np.ndarray]


def draw_of(sampling: Sampling, tokens: Sequence[int] = (), prompt: int = 0, banned: Sequence[int] = ()) -> Draw:
    return Draw(sampling, np.array(tokens, np.int32), prompt, 0, banned)


def run(context: Context, logits: np.ndarray, draws: Sequence[Draw]) -> SamplingCall:
    """The call's arrays after it ran."""
    call = sampling_call(logits, draws)
    before = call.arrays["logits"].tobytes()
    context.sample(call.host_args())
    assert call.arrays["logits"].tobytes() == before
    return call


def assert_same(found: Sequence[Pick | None], wanted: Sequence[Pick | None]) -> None:
    assert [pick and pick.token for pick in found] == [pick and pick.token for pick in wanted]
    for mine, engine in zip(found, wanted, strict=True):
        if engine is None or mine is None or engine.logprob is None or mine.logprob is None:
            assert (mine and mine.logprob) == (engine and engine.logprob)
            continue
        assert list(mine.logprob.top_ids) == list(engine.logprob.top_ids)
        assert np.allclose(mine.logprob.chosen, engine.logprob.chosen, rtol=1e-6, atol=1e-7)
        assert np.allclose(mine.logprob.top, engine.logprob.top, rtol=1e-6, atol=1e-7)


@st.composite
def cases(pick: st.DrawFn) -> tuple[np.ndarray, list[Draw]]:
    """A few rows over one small vocabulary, full of ties, zeros of either sign and -inf; every way of sampling."""
    vocabulary = pick(st.integers(1, 70))
    ids = st.integers(0, vocabulary - 1)
    rng = np.random.default_rng(pick(st.integers(0, 2**32)))
    logits = rng.integers(-40, 40, (pick(st.integers(1, 4)), vocabulary)).astype(np.float32) / 8
    logits[rng.random(logits.shape) < 0.1] = -0.0
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    draws = []
    for _ in logits:
        tokens = pick(st.lists(ids, max_size=20))
        sampling = Sampling(
            temperature=pick(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.9])),
            top_k=pick(st.sampled_from([0, 0, 1, 2, 5, 69, 200])),
            top_p=pick(st.sampled_from([1.0, 0.9517, 0.7703, 0.5, 0.3109, 0.0101, 1e-9])),
            min_p=pick(st.sampled_from([0.0, 0.0, 0.013, 0.37, 1.0])),
            repetition_penalty=pick(st.sampled_from([1.0, 1.3, 0.6])),
            presence_penalty=pick(st.sampled_from([0.0, 0.7, -1.1])),
            frequency_penalty=pick(st.sampled_from([0.0, 0.3, -0.2])),
            logit_bias=pick(st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 0.1, 3.0]), max_size=5)),
            logprobs=pick(st.sampled_from([-1, 0, 1, 3, 20])),
            seed=pick(st.integers(0, 2**64 - 1)),
        )
        banned = pick(st.lists(ids, max_size=3))
        draws.append(draw_of(sampling, tokens, pick(st.integers(0, len(tokens))), banned))
    return logits, draws


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cases())
def test_every_pick_and_log_probability_is_the_engine_samplers(
    context: Context, case: tuple[np.ndarray, list[Draw]]
) -> None:
    logits, draws = case
    assert_same(run(context, logits, draws).picks(), sample(torch.from_numpy(logits), draws))


WAYS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=5)
    for temperature, (top_k, top_p, min_p) in itertools.product(
        [0.2, 1.0, 2.0], [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (2000, 0.95, 0.02)]
    )
]


@pytest.mark.parametrize(("vocabulary", "spread"), [(1000, 1.0), (32003, 4.0), (128256, 2.0), (128256, 0.001)])
def test_rows_of_real_size_draw_what_the_engine_draws(
    context: Context, normal: Normal, vocabulary: int, spread: float
) -> None:
    logits = spread * normal(2, vocabulary)
    for seed, sampling in enumerate(WAYS):
        draws = [draw_of(Sampling(*_with(sampling, seed=seed + row)), range(7), 3) for row in range(len(logits))]
        assert_same(run(context, logits, draws).picks(), sample(torch.from_numpy(logits), draws))


def _with(sampling: Sampling, **changes: int) -> tuple[object, ...]:
    return tuple(changes.get(name, getattr(sampling, name)) for name in sampling.__struct_fields__)


def test_many_draws_of_one_row_are_the_engines(context: Context, normal: Normal) -> None:
    logits = np.repeat(2 * normal(1, 500), 400, axis=0)
    draws = [draw_of(Sampling(temperature=1.1, top_p=0.97, seed=2**63 + 5), range(n)) for n in range(len(logits))]
    wanted = sample(torch.from_numpy(logits), draws)
    assert len({pick.token for pick in wanted if pick}) > 50
    assert_same(run(context, logits, draws).picks(), wanted)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token_and_feeds_zero_to_the_next_step(
    context: Context, normal: Normal, bad: float, temperature: float
) -> None:
    logits = normal(3, 33)
    logits[0, 32], logits[1] = bad, -np.inf
    call = run(context, logits, [draw_of(Sampling(temperature=temperature, logprobs=2))] * 3)
    chosen = call.arrays["tokens"][2].item()
    assert call.arrays["tokens"].tolist() == [-1, -1, chosen]
    assert call.arrays["next_tokens"].tolist() == [0, 0, chosen]
    assert (call.arrays["top_ids"][:2] == UNTOUCHED).all()
    assert np.isnan(call.arrays["logprobs"][:2]).all()
    assert call.arrays["history_lengths"].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "sampling", [Sampling(logit_bias={0: 3e38}), Sampling(logit_bias=dict.fromkeys(range(5), -np.inf))]
)
def test_edits_that_leave_nothing_finite_leave_no_token(context: Context, sampling: Sampling) -> None:
    logits = np.full((1, 5), 2e38, np.float32)
    assert run(context, logits, [draw_of(sampling)]).picks() == [None]


def test_the_chosen_id_is_counted_until_the_history_is_full(context: Context) -> None:
    logits = np.array([[0, 9, 0, 0, 0, 0]] * 3, np.float32)
    call = sampling_call(logits, [draw_of(Sampling(), [1, 1, 4], 1), draw_of(Sampling(), [4], 1), draw_of(Sampling())])
    histories, lengths = call.arrays["histories"], call.arrays["history_lengths"]
    lengths[2], histories[2] = call.counts["history_capacity"], (5, 2)
    context.sample(call.host_args())
    assert histories[0][:2].tolist() == [(1, 2), (4, 1)]
    assert histories[1][:2].tolist() == [(4, 0), (1, 1)]
    assert lengths.tolist() == [2, 2, call.counts["history_capacity"]]
    assert (histories[2]["token"] == 5).all()


def test_a_row_that_is_not_active_is_left_alone(context: Context, normal: Normal) -> None:
    call = sampling_call(normal(2, 9), [draw_of(Sampling(logprobs=3), [1])] * 2)
    call.arrays["params"][0]["active"] = 0
    call.arrays["logits"][0] = np.nan
    context.sample(call.host_args())
    assert call.arrays["tokens"][0] == call.arrays["next_tokens"][0] == UNTOUCHED
    assert (call.arrays["top_ids"][0] == UNTOUCHED).all()
    assert call.arrays["history_lengths"].tolist() == [1, 2]


def test_what_lies_outside_its_array_is_ignored(context: Context) -> None:
    sampling = Sampling(logit_bias={1: 5.0}, repetition_penalty=1.5)
    call = sampling_call(np.arange(8, dtype=np.float32)[None], [draw_of(sampling, [3], 1)])
    call.arrays["biases"]["token"] = 8
    call.arrays["histories"][0][0] = (-1, 2)
    params = call.arrays["params"]
    for start, count, history, following in [(0, 1, 0, 0), (-5, 99, 7, 1), (2**31 - 2, 2**31 - 1, -9, -2)]:
        params["bias_start"], params["bias_count"], params["history"], params["next"] = start, count, history, following
        context.sample(call.host_args())
        assert call.arrays["tokens"].tolist() == [7]


def test_a_row_has_the_same_bits_in_every_batch(context: Context, single: Context, normal: Normal) -> None:
    logits = 3 * normal(9, 1111)
    draws = [draw_of(Sampling(*_with(way, seed=row)), [3, 4, 3], 1) for row, way in zip(range(9), WAYS, strict=False)]
    whole = run(context, logits, draws)
    for row in range(9):
        alone = run(single, logits[row : row + 1], draws[row : row + 1])
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            assert alone.arrays[name][0].tobytes() == whole.arrays[name][row].tobytes()


def test_bad_arguments_are_refused(context: Context, normal: Normal) -> None:
    call = sampling_call(normal(2, 9), [draw_of(Sampling(logprobs=3), [1])] * 2)
    context.sample(sample_struct(rows=0, vocabulary=1, stride=1))  # no rows is no work
    for changes, problem in [({"size": 8}, "size"), ({"flags": 1}, "size"), ({"logits": 0}, "NULL"),
                             ({"scores": 0}, "NULL"), ({"top_ids": 0}, "NULL"), ({"histories": 0}, "NULL"),
                             ({"vocabulary": 0}, "count"), ({"vocabulary": 2**18 + 1, "stride": 2**19}, "count"),
                             ({"tops": 21}, "count"), ({"rows": -1}, "count"), ({"stride": 8}, "fit"),
                             ({"tokens": call.arrays["tokens"].ctypes.data + 2}, "aligned")]:  # fmt: skip
        args = call.host_args()
        for name, value in changes.items():
            setattr(args, name, value)
        with pytest.raises(KernelError, match=problem):
            context.sample(args)
    assert (call.arrays["tokens"] == UNTOUCHED).all()
