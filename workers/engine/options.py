"""How an engine process is told what to be: one flag per field, made and read from the same struct.

The one rule: zero means "decide from the machine and the model"; everything else is taken as said or refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine."""

    model: str  # artefact directory
    device: str = "cpu"
    kernel_mode: str = "fused"  # serves only if it agrees with "standard" at start-up
    threads: int = 0  # torch intra-op threads; 0 = the CPUs this process may use
    max_batch_tokens: int = 64  # tokens of one step; a prefill chunk of 64 holds streams up for 0.1 s on two CPUs
    itl_slo_ms: float = 0.0  # objective between two tokens of a stream: prefills beside it are cut to it; 0 = off
    max_seqs: int = 32  # sequences running at once
    max_held: int = 4096  # sequences held, waiting or running; not below what the door admits
    max_context: int = 0  # 0 = the model's own
    kv_blocks: int = 0  # blocks of 16 tokens; 0 = from memory
    kv_memory_fraction: float = 0.3  # share of the memory left beside the weights that the cache may take
    memory_limit_mb: int = 0  # 0 = what the machine or its control group has available


def to_arguments(fd: int, options: EngineOptions) -> list[str]:
    """Command-line arguments for `python -m workers.engine.process`, with the mailbox at descriptor `fd`."""
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in msgspec.structs.asdict(options).items())
    return [f"--fd={fd}", *flags]


def from_arguments(arguments: Sequence[str]) -> tuple[int, EngineOptions]:
    """The descriptor and the options of `to_arguments`; exits with a usage message on anything else."""
    parser = argparse.ArgumentParser(prog="workers.engine.process", description="One engine behind a worker's door.")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the mailbox to the door")
    for field in msgspec.structs.fields(EngineOptions):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=field.type, required=field.required, default=field.default)
    given = vars(parser.parse_args(arguments))
    return given.pop("fd"), EngineOptions(**given)
