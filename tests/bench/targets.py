"""The rows that a GPU run is held against: peers, gates and stretches as given, read from `targets_h200.json`.

The one rule: where a peer was measured on the same machine, the gate keeps its distance to that peer, not its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

PATH = Path(__file__).parent / "targets_h200.json"
Case = tuple[str, int, int | str, str]  # shape, tensor-parallel degree, batch or workload, metric


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row. Milliseconds are at most the gate, tokens per second at least."""

    shape: str
    tp: int
    metric: str  # tpot_ms, ttft_ms or out_tok_s
    gate: float
    stretch: float
    vllm: float
    hf: float | None = None
    floor: float | None = None  # as the targets state it; `roofline` computes its own
    batch: int | None = None
    workload: str | None = None  # requests × input / output: "1000x128/128"

    @property
    def case(self) -> Case:
        """What is measured."""
        return self.shape, self.tp, self.batch or self.workload or "", self.metric

    def beside(self, vllm: float) -> Target:
        """The same target where vLLM was measured as `vllm`."""
        ratio = vllm / self.vllm
        return msgspec.structs.replace(self, vllm=vllm, gate=self.gate * ratio, stretch=self.stretch * ratio)

    def met(self, value: float) -> bool:
        """Whether a value keeps the gate."""
        return value >= self.gate if self.metric == "out_tok_s" else value <= self.gate


class Online(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rate of the open-loop load: goodput at least, 99th percentile of the time between tokens at most."""

    shape: str
    rate: int  # requests per second
    vllm: dict[str, float | list[float]]  # ttft_ms and itl_ms as p50, p90, p99; goodput
    gate: dict[str, float]
    stretch: dict[str, float]

    def met(self, said: Mapping[str, Any]) -> bool:
        """Whether the client's line (`goodput`, `itl_ms`) keeps the gate."""
        longest = said["itl_ms"][2]  # none where nothing was answered
        return said["goodput"] >= self.gate["goodput"] and longest is not None and longest <= self.gate["itl_p99_ms"]


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    machine: str
    peers: dict[str, str]  # names with versions
    engine: list[Target]
    online: list[Online]


def load() -> Targets:
    """The committed table."""
    return msgspec.json.decode(PATH.read_bytes(), type=Targets)


def peer_values(lines: Iterable[str]) -> Mapping[Case, float]:
    """What vLLM reached, from its script's JSON lines (shape in `model`, degree in `tp`); other lines are skipped."""
    found: dict[Case, float] = {}
    for line in lines:
        if not line.startswith('{"engine"'):
            continue
        said = msgspec.json.decode(line)
        for metric in ("tpot_ms", "ttft_ms", "out_tok_s"):
            if metric in said:
                found[said["model"], said["tp"], said.get("bs") or said["workload"], metric] = said[metric]
    return found
