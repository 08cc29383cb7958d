"""From an artefact directory to a model that may serve.

The one rule: `fused` serves only after it has agreed with `standard` on this machine; otherwise `standard` serves and
says so loudly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trunkline_kernels.door import KernelError
from workers.engine.batch import KVCache, RaggedBatch
from workers.models.config import ModelConfig
from workers.models.llama import Llama
from workers.models.ops import Ops
from workers.models.registry import family
from workers.models.selfcheck import largest_difference
from workers.models.standard import StandardOps
from workers.weights.load import Progress, check_texts, load_weights, no_progress
from workers.weights.manifest import Manifest, read_manifest

_log = logging.getLogger(__name__)
KERNEL_MODES = ("fused", "standard")
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative, of logits


@dataclass(frozen=True, slots=True)
class Model:
    """A verified, loaded model. One step at a time; not thread-safe."""

    config: ModelConfig
    manifest: Manifest
    kernel_mode: str  # what serves, which may be less than what was asked for
    path: str  # the numeric path, for people and for Describe
    invariant: bool  # bits independent of batch composition, chunking, prefix hits and preemption
    weight_bytes: int  # held in memory by weights
    dtype: torch.dtype  # of activations and of the KV cache
    device: torch.device
    decoder: Llama

    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """Run one step and write its keys and values: final-normed hidden states [T, d]."""
        return self.decoder.forward(batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary scores of rows of `forward`'s result: [R, d] → fp32 [R, V]."""
        return self.decoder.logits(hidden)


def load_model(
    directory: Path, *, kernel_mode: str, threads: int, device: str = "cpu", progress: Progress = no_progress
) -> Model:
    """Verify and load an artefact; raises ArtefactError when anything in it is not as converted.

    `kernel_mode` is `fused` or `standard`; the model says in its own `kernel_mode` which one serves. `threads` compute,
    the caller's among them. Sets torch's thread count for the whole process: 1 where our kernels serve.
    """
    if kernel_mode not in KERNEL_MODES:
        raise ValueError(f"kernel_mode {kernel_mode!r} is not one of {', '.join(KERNEL_MODES)}")
    torch.set_num_threads(threads)
    manifest = read_manifest(directory)
    config = check_texts(directory, manifest)
    weights = load_weights(directory, manifest, config, threads, progress)
    place = torch.device(device)
    placed = {name: _placed(tensor, place) for name, tensor in weights.tensors.items()}
    standard = _model(config, manifest, "standard", StandardOps(place), placed)
    fused = _fused(standard, placed, threads, progress) if kernel_mode == "fused" else None
    if fused is None:
        return standard
    weights.drop_pages()  # what serves now is the packed copy
    torch.set_num_threads(1)  # idle torch threads spin, and would take the cores from our own
    return fused


def _fused(standard: Model, weights: Mapping[str, torch.Tensor], threads: int, progress: Progress) -> Model | None:
    """The model on our kernels, or None, with the reason in the log, if they may not serve here."""
    try:
        fused = _on_gpu(standard) if standard.device.type == "cuda" else _packed(standard, weights, threads, progress)
    except (ImportError, KernelError) as error:
        _log.error("fused kernels do not serve: %s; standard serves instead", error)
        return None
    torch.set_num_threads(1)  # torch's threads spin while they wait: beside a busy process the check takes minutes
    error_found = largest_difference(fused, standard)
    torch.set_num_threads(threads)
    limit = MAX_DIFFERENCE[standard.dtype]
    if not error_found <= limit:  # also when it is NaN
        _log.error(
            "fused kernels do not serve: logits differ from standard by %.1e (limit %.0e); standard serves instead",
            error_found,
            limit,
        )
        return None
    return fused


def _on_gpu(standard: Model) -> Model:
    """The same weights under the CUDA kernels."""
    if standard.dtype is not torch.bfloat16:
        raise KernelError(f"the CUDA kernels compute in bf16, the artefact is {standard.manifest.precision}")
    from workers.models.cuda import CudaOps

    torch.cuda.synchronize(standard.device)  # the kernels read weights ahead of what is on the stream
    ops = CudaOps(standard.device)
    decoder = standard.decoder.under(ops)
    return replace(standard, kernel_mode="fused", path=ops.path, invariant=ops.invariant, decoder=decoder)


def _packed(standard: Model, weights: Mapping[str, torch.Tensor], threads: int, progress: Progress) -> Model:
    """The CPU kernels, with the weights as they want them."""
    from workers.models.fused import FusedOps

    ops = FusedOps(threads)
    progress("pack weights", 0.0)
    fused = _model(standard.config, standard.manifest, "fused", ops, weights)
    progress("pack weights", 1.0)
    return fused


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The CPU computes in fp32 whatever was stored; bf16 → fp32 is exact."""
    return tensor.float() if device.type == "cpu" else tensor.to(device)


def _model(
    config: ModelConfig, manifest: Manifest, kernel_mode: str, ops: Ops, weights: Mapping[str, torch.Tensor]
) -> Model:
    decoder = family(config.architecture).model(config, ops, weights)
    # A tied embedding is kept twice by kernels that pack it: as the table and as the output matrix.
    packed_head = decoder.embedding.nbytes if kernel_mode == "fused" and config.tied else 0
    return Model(
        config=config,
        manifest=manifest,
        kernel_mode=kernel_mode,
        path=ops.path,
        invariant=ops.invariant,
        weight_bytes=sum(tensor.nbytes for tensor in weights.values()) + packed_head,
        dtype=decoder.dtype,
        device=decoder.device,
        decoder=decoder,
    )
