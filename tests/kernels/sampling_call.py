"""Engine draws as the arrays of a sampling call, the same for the CPU and the CUDA library."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import sizeof
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trunkline_kernels.door import SampleArgs, SampleBias, SampleCount, SampleRow
from workers.engine.messages import Logprob
from workers.engine.sampler import Draw, Pick

ROW, BIAS, COUNT = np.dtype(SampleRow), np.dtype(SampleBias), np.dtype(SampleCount)
UNTOUCHED = -7  # what outputs hold before the call
SPARE = 3  # entries of a history beyond what it needs


@dataclass
class SamplingCall:
    """Arrays of one call. `arrays` maps a field of `SampleArgs` to its array, `counts` to its number."""

    arrays: dict[str, np.ndarray]
    counts: dict[str, int]
    wants: list[int] = field(default_factory=list)  # logprobs per row

    def args(self, addresses: dict[str, int]) -> SampleArgs:
        """The struct, with addresses of these arrays or of copies elsewhere."""
        return SampleArgs(size=sizeof(SampleArgs), **addresses, **self.counts)

    def host_args(self) -> SampleArgs:
        return self.args({name: array.ctypes.data for name, array in self.arrays.items()})

    def picks(self) -> list[Pick | None]:
        """What the call wrote, as the engine's sampler says it."""
        found: list[Pick | None] = []
        for row, token in enumerate(self.arrays["tokens"].tolist()):
            wanted = min(self.wants[row], self.counts["vocabulary"])
            ids, values = self.arrays["top_ids"][row], self.arrays["top_logprobs"][row]
            assert (ids[max(wanted, 0) :] == UNTOUCHED).all() or token < 0
            logprob = Logprob(self.arrays["logprobs"][row].item(), ids[:wanted].tolist(), values[:wanted].tolist())
            found.append(None if token < 0 else Pick(token, logprob if wanted >= 0 else None))
        return found


def sampling_call(logits: npt.NDArray[np.float32], draws: Sequence[Draw], tops: int = 20) -> SamplingCall:
    """One call for `draws` over `logits` [rows, vocabulary]; rows are padded to a multiple of 4 with NaN."""
    rows, vocabulary = logits.shape
    stride = -(-vocabulary // 4) * 4
    padded = np.full((rows, stride), np.nan, np.float32)
    padded[:, :vocabulary] = logits
    params = np.zeros(rows, ROW)
    biases: list[tuple[int, float]] = []
    histories: list[list[tuple[int, int]]] = []
    for row, draw in enumerate(draws):
        sampling, params[row]["bias_start"] = draw.sampling, len(biases)
        edits = {**sampling.logit_bias, **dict.fromkeys(draw.banned, -np.inf)}
        biases += edits.items()
        for name in ("seed", "temperature", "top_k", "top_p", "min_p", "logprobs", "presence_penalty",
                     "frequency_penalty", "repetition_penalty"):  # fmt: skip
            params[row][name] = getattr(sampling, name)
        params[row]["active"], params[row]["bias_count"], params[row]["next"] = 1, len(edits), row
        params[row]["choice"], params[row]["position"] = draw.choice, draw.position
        params[row]["history"] = len(histories)
        ids, counts = np.unique(draw.tokens[draw.prompt_length :], return_counts=True)
        seen = dict.fromkeys(draw.tokens.tolist(), 0) | dict(zip(ids.tolist(), counts.tolist(), strict=True))
        histories.append(list(seen.items()))
    capacity = max((len(each) for each in histories), default=0) + SPARE
    arrays = {
        "logits": padded,
        "params": params,
        "biases": np.array(biases, BIAS),
        "histories": np.array([each + [(UNTOUCHED, 0)] * (capacity - len(each)) for each in histories], COUNT),
        "history_lengths": np.array([len(each) for each in histories], np.int32),
        "tokens": np.full(rows, UNTOUCHED, np.int32),
        "next_tokens": np.full(rows, UNTOUCHED, np.int32),
        "logprobs": np.full(rows, np.nan, np.float32),
        "top_ids": np.full((rows, tops), UNTOUCHED, np.int32),
        "top_logprobs": np.full((rows, tops), np.nan, np.float32),
        "scores": np.full((rows, stride), np.nan, np.float32),
    }
    counts = {"rows": rows, "vocabulary": vocabulary, "stride": stride, "bias_total": len(biases), "tops": tops,
              "history_total": rows, "history_capacity": capacity, "next_total": rows}  # fmt: skip
    return SamplingCall(arrays, counts, [draw.sampling.logprobs for draw in draws])
