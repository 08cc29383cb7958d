"""tl_cuda_sample against tl_sample, its specification: the same bits, but for the last ones of log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.gpu.buffers import Buffer, assert_intact, captured, guarded, stream
from tests.kernels.sampling_call import UNTOUCHED, SamplingCall, sampling_call
from trunkline_kernels.build import build
from trunkline_kernels.cuda.door import PDL
from trunkline_kernels.cuda.sampling import sample
from trunkline_kernels.door import Context, SampleArgs
from workers.engine import sampler
from workers.engine.messages import Sampling
from workers.engine.sampler import Draw

WRITTEN = ("tokens", "next_tokens", "logprobs", "top_ids", "top_logprobs", "histories", "history_lengths")
VOCABULARIES = [1, 2, 31, 32, 33, 257, 1000, 8191, 8193, 32003, 49152, 128256, 151936, 262143, 262144]


class DeviceCall:
    """A call's arrays in device memory, with guard bytes around each; the room of the CPU call is left out."""

    def __init__(self, call: SamplingCall) -> None:
        self.host = call
        self.buffers = {name: on_device(array) for name, array in call.arrays.items() if name != "scores"}

    def args(self, flags: int = 0) -> SampleArgs:
        args = self.host.args({name: buffer.address for name, buffer in self.buffers.items()})
        args.flags = flags
        return args

    def run(self, flags: int = 0) -> None:
        sample(self.args(flags), stream())

    def upload(self, call: SamplingCall) -> None:
        """Other contents of the same shapes, at the same addresses."""
        for name, buffer in self.buffers.items():
            buffer.tensor.copy_(as_bytes(call.arrays[name]))

    def found(self) -> dict[str, np.ndarray]:
        """What lies in the arrays that a call writes, after checking that nothing was written beside them."""
        assert_intact(*self.buffers.values())
        arrays = self.host.arrays
        return {
            name: np.frombuffer(self.buffers[name].bits, arrays[name].dtype).reshape(arrays[name].shape)
            for name in WRITTEN
        }


def as_bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())


def on_device(array: np.ndarray) -> Buffer:
    return guarded(as_bytes(array))


@pytest.fixture(scope="session")
def context() -> Context:
    build()
    return Context(4)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name in WRITTEN:
        if name.endswith("logprobs"):
            assert np.allclose(found[name], wanted[name], rtol=1e-6, atol=1e-7, equal_nan=True), name
        else:
            assert found[name].tobytes() == wanted[name].tobytes(), name


def bits(found: dict[str, np.ndarray]) -> bytes:
    return b"".join(found[name].tobytes() for name in WRITTEN)


def some_scores(rng: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Rows of all kinds: spread, flat, full of ties, all equal, with -inf, zeros of either sign, or not finite."""
    logits = (3 * rng.standard_normal((rows, vocabulary))).astype(np.float32)
    for row, kind in zip(logits, itertools.cycle(range(8)), strict=False):
        if kind == 1:
            row *= 1e-3
        elif kind == 2:
            row[:] = np.round(row)
        elif kind == 3:
            row[:] = -5.0
        elif kind == 4:
            row[rng.random(vocabulary) < 0.5] = -np.inf
        elif kind == 5:
            row[rng.random(vocabulary) < 0.5] = -0.0
        elif kind == 6 and rng.random() < 0.3:
            row[rng.integers(vocabulary)] = rng.choice([np.nan, np.inf, -np.nan])
    return logits


def some_draws(rng: np.random.Generator, rows: int, vocabulary: int) -> list[Draw]:
    """Every way of sampling, mixed at random."""

    def one(*values: float) -> float:
        return values[rng.integers(len(values))]

    def draw(row: int) -> Draw:
        tokens = rng.integers(0, vocabulary, rng.integers(0, 3000 if row % 9 == 0 else 40)).astype(np.int32)
        sampling = Sampling(
            temperature=one(0.0, 1e-6, 0.3, 1.0, 1.9),
            top_k=int(one(0, 0, 1, 5, 50, 2000)),
            top_p=one(1.0, 0.95, 0.77, 0.5, 0.01, 1e-9),
            min_p=one(0.0, 0.0, 0.013, 0.37, 1.0),
            repetition_penalty=one(1.0, 1.3, 0.6),
            presence_penalty=one(0.0, 0.7, -1.1),
            frequency_penalty=one(0.0, 0.3, -0.2),
            logit_bias={int(id_): one(-100.0, -0.5, 0.1, 3.0) for id_ in rng.integers(0, vocabulary, rng.integers(5))},
            logprobs=int(one(-1, 0, 1, 3, 20)),
            seed=int(rng.integers(2**63)) * 2 + row % 2,
        )
        prompt = int(rng.integers(0, len(tokens) + 1))
        return Draw(sampling, tokens, prompt, row % 3, tuple(rng.integers(0, vocabulary, rng.integers(3)).tolist()))

    return [draw(row) for row in range(rows)]


def calls(rng: np.random.Generator, vocabulary: int, rows: int) -> Iterator[SamplingCall]:
    """The same call again and again, in fresh arrays."""
    logits, draws = some_scores(rng, rows, vocabulary), some_draws(rng, rows, vocabulary)
    while True:
        yield sampling_call(logits, draws)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("flags", [0, PDL])
def test_every_way_of_sampling_gives_the_bits_of_the_specification(
    context: Context, rng: np.random.Generator, vocabulary: int, flags: int
) -> None:
    fresh = calls(rng, vocabulary, 48)
    wanted, on_gpu = next(fresh), DeviceCall(next(fresh))
    on_gpu.run(flags)
    context.sample(wanted.host_args())
    assert_same(on_gpu.found(), wanted.arrays)


@pytest.mark.parametrize("vocabulary", [500, 128256])
def test_draws_are_the_engine_samplers(rng: np.random.Generator, vocabulary: int) -> None:
    logits = np.repeat((2 * rng.standard_normal((1, vocabulary))).astype(np.float32), 200, axis=0)
    sampling = Sampling(temperature=1.1, top_p=0.97, top_k=400, seed=2**63 + 5)
    draws = [Draw(sampling, np.zeros(position, np.int32), 0, 0) for position in range(len(logits))]
    on_gpu = DeviceCall(sampling_call(logits, draws))
    on_gpu.run()
    wanted = [pick.token for pick in sampler.sample(torch.from_numpy(logits), draws) if pick]
    assert len(set(wanted)) > 50
    assert on_gpu.found()["tokens"].tolist() == wanted


def test_a_row_has_the_same_bits_alone_and_in_every_batch(rng: np.random.Generator) -> None:
    logits, draws = some_scores(rng, 133, 32003), some_draws(rng, 133, 32003)
    whole = DeviceCall(sampling_call(logits, draws))
    whole.run()
    found = whole.found()
    for row in range(0, 133, 7):
        alone = DeviceCall(sampling_call(logits[row : row + 1], draws[row : row + 1]))
        alone.run()
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            assert alone.found()[name][0].tobytes() == found[name][row].tobytes()


@pytest.mark.parametrize("flags", [0, PDL])
def test_the_same_call_gives_the_same_bits_every_time(rng: np.random.Generator, flags: int) -> None:
    fresh = calls(rng, 128256, 40)
    on_gpu = DeviceCall(next(fresh))
    seen = set()
    for _ in range(20):
        on_gpu.upload(next(fresh))
        on_gpu.run(flags)
        seen.add(bits(on_gpu.found()))
    assert len(seen) == 1


@pytest.mark.parametrize("flags", [0, PDL])
def test_a_captured_call_samples_what_lies_in_its_arrays_at_each_replay(
    context: Context, rng: np.random.Generator, flags: int
) -> None:
    logits = some_scores(rng, 16, 49152)
    draws = [Draw(Sampling(seed=row), np.zeros(64, np.int32), 0, 0) for row in range(16)]
    on_gpu = DeviceCall(sampling_call(logits, draws))
    graph = captured(lambda: on_gpu.run(flags))
    for temperature, active in [(0.0, 16), (1.0, 9), (0.7, 1), (1.3, 16)]:
        changed = [sampling_call(some_scores(np.random.default_rng(5), 16, 49152), draws) for _ in range(2)]
        for call in changed:
            call.arrays["params"]["temperature"], call.arrays["params"]["position"] = temperature, active
            call.arrays["params"]["active"][active:] = 0
        on_gpu.upload(changed[0])
        graph.replay()
        context.sample(changed[1].host_args())
        found = on_gpu.found()
        assert_same(found, changed[1].arrays)
        assert (found["tokens"][active:] == UNTOUCHED).all()


def test_the_history_that_a_call_leaves_penalises_the_next(context: Context, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((3, 1000)).astype(np.float32)
    sampling = Sampling(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2)
    call, twin = (sampling_call(logits, [Draw(sampling, np.arange(3, dtype=np.int32), 1, 0)] * 3) for _ in range(2))
    on_gpu = DeviceCall(call)
    for _ in range(6):  # more steps than the history has room for
        on_gpu.run(PDL)
        context.sample(twin.host_args())
        assert_same(on_gpu.found(), twin.arrays)


def test_what_lies_outside_its_array_is_ignored_and_never_faults(context: Context) -> None:
    sampling = Sampling(logit_bias={1: 5.0}, repetition_penalty=1.5)
    outside = [
        (0, 1, 0, 0),
        (-5, 99, 7, 1),
        (2**31 - 2, 2**31 - 1, -9, -2),
        (-(2**31), 2**31 - 1, 2**31 - 1, 2**31 - 1),
    ]
    for start, count, history, following in outside:
        call, twin = (
            sampling_call(np.arange(8, dtype=np.float32)[None], [Draw(sampling, np.array([3], np.int32), 1, 0)])
            for _ in range(2)
        )
        for each in (call, twin):
            params, each.arrays["biases"]["token"], each.arrays["histories"][0][0] = each.arrays["params"], 8, (-1, 2)
            params["bias_start"], params["bias_count"], params["history"], params["next"] = (
                start,
                count,
                history,
                following,
            )
        on_gpu = DeviceCall(call)
        on_gpu.run()
        context.sample(twin.host_args())
        assert_same(on_gpu.found(), twin.arrays)


def microseconds(run: Callable[[], None], calls_per_graph: int = 20) -> float:
    """Of one call, from replays of a graph of many."""
    graph = captured(lambda: [run() for _ in range(calls_per_graph)] and None)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / (10 * calls_per_graph)


SPEEDS: Sequence[tuple[int, Sampling, float]] = (
    (1, Sampling(), 15),
    (128, Sampling(), 100),
    (1, Sampling(temperature=1.0), 60),
    (1, Sampling(temperature=0.7, top_p=0.9), 60),
    (1, Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01), 60),
)


@pytest.mark.parametrize(("rows", "sampling", "limit"), SPEEDS)
def test_a_call_over_128k_ids_takes_no_longer_than_planned(
    rng: np.random.Generator,
    rows: int,
    sampling: Sampling,
    limit: float,
    record_property: Callable[[str, object], None],
) -> None:
    logits = (2.5 * rng.standard_normal((rows, 128256))).astype(np.float32)
    draws = [Draw(sampling, np.zeros(0, np.int32), 0, 0)] * rows
    on_gpu = DeviceCall(sampling_call(logits, draws))
    taken = microseconds(lambda: on_gpu.run(PDL))
    record_property("microseconds", taken)
    assert taken <= limit, f"{taken:.1f} µs, planned {limit} µs"
