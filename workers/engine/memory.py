"""Whether a model fits, and how many KV blocks beside it: decided before anything is loaded.

The one rule: too little memory is said with numbers, how much is needed and how much there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from workers.engine.batch import BLOCK_SIZE
from workers.engine.blocks import blocks_for
from workers.engine.options import EngineOptions
from workers.models.config import ModelConfig
from workers.weights.plan import plan_memory

MIB = 1 << 20


class TooLittleMemoryError(Exception):
    """The model, or the cache it was asked to have, does not fit."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes an engine takes."""

    weights: int
    scratch: int  # activations and logits of the largest step
    block: int  # one KV block


def footprint(config: ModelConfig, options: EngineOptions, precision: str) -> Footprint:
    """What `config` takes in `precision` (fp32, bf16) under these options."""
    packed = options.kernel_mode != "standard"  # our CPU kernels read a packed copy of a tied embedding
    rank = plan_memory(config, precision=precision, memory=0, packed=packed).ranks[0]
    widths = 8 * config.hidden_size + 3 * config.intermediate_size
    scratch = 4 * (options.max_batch_tokens * widths + 2 * options.max_seqs * config.vocab_size)
    return Footprint(rank.weight_bytes, scratch, rank.kv_bytes_per_token * BLOCK_SIZE)


def plan_blocks(size: Footprint, options: EngineOptions, context: int, available: int) -> int:
    """KV blocks for sequences of up to `context` tokens in `available` bytes.

    What `kv_blocks` asks for, or the wanted share of what the weights leave: at least one whole context, at most what
    `max_seqs` whole contexts could use. Raises TooLittleMemoryError.
    """
    least = options.kv_blocks or blocks_for(context)
    needed = size.weights + size.scratch + least * size.block
    if needed > available:
        raise TooLittleMemoryError(
            f"{needed // MIB} MiB of memory are needed ({size.weights // MIB} for weights, {size.scratch // MIB} for "
            f"activations, {least * size.block // MIB} for a cache of {least * BLOCK_SIZE} tokens), "
            f"{available // MIB} MiB are available"
        )
    if options.kv_blocks:
        return options.kv_blocks
    share = int((available - size.weights - size.scratch) * options.kv_memory_fraction) // size.block
    return max(least, min(share, options.max_seqs * blocks_for(context)))


def available_bytes(options: EngineOptions) -> int:
    """Memory this process may still take on its device: the device's, the machine's or the control group's."""
    device = torch.device(options.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _host_bytes()
    return min(free, options.memory_limit_mb * MIB) if options.memory_limit_mb else int(free)


def _host_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_group_bytes(Path("/sys/fs/cgroup"))])


def _group_bytes(group: Path) -> list[int]:
    """Room below a version-2 control group's limit (files that can be dropped count as room); empty without a limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return []  # no such group here: the machine's own number holds
    return [] if limit == "max" else [int(limit) - used + int(stats.get("inactive_file", 0))]
