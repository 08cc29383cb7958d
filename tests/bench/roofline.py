"""What a decode step, a prefill or a whole workload cannot go below: bytes that must move, products that must be made.

Pure arithmetic on a model's config. The one rule: only what no engine can avoid is counted (each weight and each cached
key and value read once, each product once), so a floor is never above what is possible.

`python -m tests.bench.roofline RESULT.json` draws the rows of a result under the machine's roof (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.config import ModelConfig, parse_config
from workers.models.registry import family
from workers.weights.plan import ITEM_BYTES
from workers.weights.random_model import shape_config


@dataclass(frozen=True)
class Machine:
    """What one device does at most, as measured: bytes read and bf16 operations, per second."""

    name: str
    bytes_s: float
    flop_s: float


H200 = Machine("NVIDIA H200", bytes_s=4.3e12, flop_s=798e12)


@dataclass(frozen=True)
class Work:
    """Bytes and floating-point operations of one device (a product of m × k × n counts 2·m·k·n)."""

    bytes: float
    flops: float

    def ms(self, machine: Machine = H200) -> float:
        """Milliseconds that it takes at least."""
        return 1e3 * max(self.bytes / machine.bytes_s, self.flops / machine.flop_s)


def decode(config: ModelConfig, batch: int, context: float, *, tp: int = 1) -> Work:
    """One step in which `batch` sequences of `context` tokens (the new one included) get one token each."""
    keys = batch * context
    return Work(
        (_weight_bytes(config) + keys * _kv_bytes(config)) / tp,
        (2 * batch * (_layer_weights(config) + _head_weights(config)) + keys * _attention_flops(config)) / tp,
    )


def prefill(config: ModelConfig, batch: int, prompt: int, *, tp: int = 1) -> Work:
    """`batch` prompts of `prompt` tokens, up to the first new token of each."""
    tokens, keys = batch * prompt, batch * prompt * (prompt + 1) / 2
    products = 2 * (tokens * _layer_weights(config) + batch * _head_weights(config))
    return Work(
        (_weight_bytes(config) + tokens * _kv_bytes(config)) / tp, (products + keys * _attention_flops(config)) / tp
    )


def tpot_ms(config: ModelConfig, batch: int, prompt: int, tokens: int, *, tp: int = 1) -> float:
    """Mean of the decode steps that follow a prompt and its first token until there are `tokens` new ones."""
    return decode(config, batch, prompt + tokens / 2, tp=tp).ms()


def workload_s(config: ModelConfig, requests: int, prompt: int, tokens: int, *, tp: int = 1) -> float:
    """Seconds of `requests` that all start at once and fit into memory together."""
    first = prefill(config, requests, prompt, tp=tp).ms()
    return (first + (tokens - 1) * tpot_ms(config, requests, prompt, tokens, tp=tp)) / 1e3


def _weights(config: ModelConfig, *categories: str) -> int:
    specs = family(config.architecture).weight_specs(config)
    return sum(math.prod(spec.shape) for spec in specs if spec.category in categories)


def _layer_weights(config: ModelConfig) -> int:
    return _weights(config, "attention", "mlp")


def _head_weights(config: ModelConfig) -> int:
    """A tied embedding is read whole as the head; of one that is not, a step reads only a few rows."""
    return _weights(config, "embedding" if config.tied else "head")


def _weight_bytes(config: ModelConfig) -> int:
    return ITEM_BYTES["bf16"] * (_layer_weights(config) + _head_weights(config) + _weights(config, "norm"))


def _kv_bytes(config: ModelConfig) -> int:
    """Of one token in all layers."""
    return ITEM_BYTES["bf16"] * 2 * config.layers * config.kv_heads * config.head_dim


def _attention_flops(config: ModelConfig) -> int:
    """Of one query and one key in all layers: a score, and its share of the mixed values."""
    return 4 * config.layers * config.heads * config.head_dim


def main() -> None:
    """Draws the decode rows of a result, beside it, as PNG."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("result", type=Path, help="JSON of tests.bench.engine_gpu")
    path: Path = parser.parse_args().result
    picture = path.with_suffix(".png")
    if not draw(json.loads(path.read_text()), picture):
        sys.exit("no picture: it needs matplotlib (pip install matplotlib)")
    sys.stdout.write(f"{picture}\n")


def draw(result: dict[str, Any], picture: Path, machine: Machine = H200) -> bool:
    """Operations per second over operations per byte, one dot per decode row; False where matplotlib is absent."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(8, 5), dpi=120)).add_subplot()
    intensities = sorted([*(2.0**power for power in range(-1, 12)), machine.flop_s / machine.bytes_s])
    axes.loglog(
        intensities, [min(machine.flop_s, machine.bytes_s * x) / 1e12 for x in intensities], color="#333", label="roof"
    )
    for row in result["rows"]:
        if row["metric"] == "tpot_ms":
            config, context = parse_config(shape_config(row["shape"])), result["prompt"] + result["tokens"] / 2
            work = decode(config, row["batch"], context, tp=row["tp"])
            place = (work.flops / work.bytes, work.flops / row["value"] / 1e9)
            axes.plot(*place, "o", color="#0b6e99")
            axes.annotate(
                f"{row['shape']} ×{row['batch']} {row['mode']}",
                place,
                fontsize=7,
                xytext=(6, -8),
                textcoords="offset points",
            )
    axes.set(title=f"Decode steps on {machine.name}", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.grid(visible=True, which="major", color="#ddd")
    figure.savefig(picture)
    return True


if __name__ == "__main__":
    main()
