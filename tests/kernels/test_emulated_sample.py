"""The code of the CUDA library's sampling, run on the CPU: the bits of tl_sample, its specification.

See `tests.kernels.emulator.emulated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.emulator.emulated import Emulator, broken
from tests.kernels.sampling_call import SamplingCall, sampling_call
from trunkline_kernels.build import build
from trunkline_kernels.door import Context
from workers.engine.messages import Sampling
from workers.engine.sampler import Draw

pytestmark = pytest.mark.timeout(180)  # the first test compiles
WAYS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(temperature=1.0, seed=2**63 + 5),
    "top_k": Sampling(temperature=0.9, top_k=5, seed=3),
    "top_p": Sampling(temperature=1.3, top_p=0.77, seed=4),
    "all": Sampling(
        temperature=1.1, top_k=40, top_p=0.95, min_p=0.013, repetition_penalty=1.3, presence_penalty=0.7,
        frequency_penalty=-0.2, logit_bias={0: 3.0}, logprobs=20, seed=9,
    ),
    "greedy with log-probabilities": Sampling(temperature=0.0, repetition_penalty=0.6, logprobs=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def specification() -> Context:
    """The CPU library of this processor."""
    build()
    return Context(1)


def run(emulator: Emulator, call: SamplingCall, seed: int) -> dict[str, np.ndarray]:
    args = call.host_args()
    args.scores = None  # room that only the CPU call takes
    emulator.call("tl_cuda_sample", args, call.arrays.values(), seed)
    return {name: array for name, array in call.arrays.items() if name != "scores"}


def assert_same(found: dict[str, np.ndarray], wanted: SamplingCall) -> None:
    for name, array in found.items():
        if name.endswith("logprobs"):
            assert np.allclose(array, wanted.arrays[name], rtol=1e-6, atol=1e-7, equal_nan=True), name
        else:
            assert array.tobytes() == wanted.arrays[name].tobytes(), name


def some_scores(rng: np.random.Generator, kind: str, vocabulary: int) -> np.ndarray:
    logits = (3 * rng.standard_normal((1, vocabulary))).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "holes":
        logits[rng.random(logits.shape) < 0.5] = -np.inf
    return logits


def draw_of(rng: np.random.Generator, sampling: Sampling, vocabulary: int) -> Draw:
    return Draw(sampling, rng.integers(0, vocabulary, 30).astype(np.int32), 10, 1, (vocabulary - 1,))


@pytest.mark.parametrize(
    ("way", "kind", "vocabulary"),
    [
        ("greedy", "ties", 1000),
        ("plain", "spread", 8193),
        ("top_k", "ties", 300),
        ("top_p", "spread", 300),
        ("all", "spread", 8193),
        ("all", "holes", 33),
        ("greedy with log-probabilities", "ties", 1000),
    ],
)
def test_sampling_gives_the_bits_of_the_specification_in_any_order_of_its_threads(
    emulator: Emulator, specification: Context, rng: np.random.Generator, way: str, kind: str, vocabulary: int
) -> None:
    logits, draw = some_scores(rng, kind, vocabulary), draw_of(rng, WAYS[way], vocabulary)
    wanted = sampling_call(logits, [draw])
    specification.sample(wanted.host_args())
    assert_same(run(emulator, sampling_call(logits, [draw]), seed=vocabulary), wanted)


@pytest.mark.parametrize("logits", [[np.nan, 1, 2, 3], [-np.inf] * 4, [0, np.inf, 0, 0]], ids=["nan", "none", "inf"])
def test_scores_that_are_not_finite_give_no_token(
    emulator: Emulator, specification: Context, rng: np.random.Generator, logits: Sequence[float]
) -> None:
    rows, draw = np.array([logits], np.float32), draw_of(rng, WAYS["all"], 4)
    wanted = sampling_call(rows, [draw])
    specification.sample(wanted.host_args())
    assert_same(run(emulator, sampling_call(rows, [draw]), seed=1), wanted)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("      cluster.sync();\n      uint64_t amount = 0;", "      uint64_t amount = 0;"),
        ("  cooperative_groups::this_cluster().sync();\n}", "}"),
    ],
    ids=["bins are read before they are full", "a block ends while others read its shares"],
)
def test_an_error_in_sampling_is_noticed(
    emulator: Emulator, specification: Context, tmp_path: Path, rng: np.random.Generator, line: str, instead: str
) -> None:
    wrong = broken(emulator, tmp_path, "sample.cu", line, instead)

    def check_orders() -> None:
        for seed in range(8):
            logits = (0.01 * rng.standard_normal((1, 300))).astype(np.float32)  # a wrong border moves most draws
            # No more log-probabilities than that of the token: how many there are would be an error's to say.
            draw = draw_of(rng, Sampling(temperature=1.0, top_k=20, logprobs=0, seed=seed), 300)
            wanted = sampling_call(logits, [draw])
            specification.sample(wanted.host_args())
            assert_same(run(wrong, sampling_call(logits, [draw]), seed), wanted)

    with pytest.raises(AssertionError):
        check_orders()
