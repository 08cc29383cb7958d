"""Golden vectors: what transformers answers on exactly the artefact's weights, kept inside the artefact.

The one rule: they are made by transformers in fp32, never by our own model, so replaying them proves the whole path.
Everything is compared by the margin rule: see `Comparison`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.weights.manifest import ArtefactError

# Half of them have one obvious continuation, so that most positions are clear in lower precisions too.
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small lighthouse whose keeper",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "def fibonacci(n):\n    ",
    "A B C D E F G H I J K",
    "To bake a loaf of bread you first",
    "red, blue, red, blue, red, blue, red, blue,",
    "The difference between weather and climate is that",
)
TOKENS = 32  # greedy tokens per prompt
# Tolerance on the top-2 margin, in units of the position's logit standard deviation, by served precision.
MARGIN = {"fp32": 1e-3, "bf16": 0.15}
MIN_FIT = {"fp32": 0.9, "bf16": 0.7}  # share of positions that must be above it, else the prompts prove nothing
MAX_ERROR = {"fp32": 1e-4, "bf16": 5e-2}  # relative logit error per position


@dataclass(frozen=True, slots=True)
class Golden:
    """Per prompt: its ids, the greedy continuation [TOKENS] and margins; and all logits at a few (prompt, step)s."""

    prompts: tuple[torch.Tensor, ...]  # int32
    tokens: torch.Tensor  # int32 [prompts, TOKENS]
    margins: torch.Tensor  # fp32 [prompts, TOKENS]
    places: torch.Tensor  # int32 [n, 2]: prompt, step
    logits: torch.Tensor  # fp32 [n, V]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The margin rule's outcome: teacher-forced on the reference's tokens, the argmax must agree wherever the
    reference's margin is above the tolerance, and enough positions must be above it."""

    positions: int
    clear: int  # positions above the tolerance
    differing: int  # clear positions where the argmax differs
    max_error: float  # largest relative logit error
    precision: str = "fp32"

    @property
    def fit(self) -> bool:
        """Enough clear positions for the comparison to mean something."""
        return self.clear >= MIN_FIT[self.precision] * self.positions

    @property
    def passed(self) -> bool:
        """Fit, no clear position differs, and the logits are close."""
        return self.fit and not self.differing and self.max_error <= MAX_ERROR[self.precision]


def top2_margin(logits: torch.Tensor) -> torch.Tensor:
    """Distance between the two largest of `logits` [..., V], in standard deviations of the position."""
    best = logits.topk(2, dim=-1).values
    margin: torch.Tensor = (best[..., 0] - best[..., 1]) / logits.std(dim=-1)
    return margin


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """‖a − b‖₂ / ‖b‖₂ over the last dimension."""
    error: torch.Tensor = (ours - reference).norm(dim=-1) / reference.norm(dim=-1)
    return error


def reference_model(raw_config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Any:
    """transformers' own model in fp32 on `weights`; raises ArtefactError if transformers is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ArtefactError("golden vectors", "making them needs transformers (pip install transformers)") from error
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.for_model(**raw_config)
    model_class = getattr(transformers, raw_config["architectures"][0])
    state = {name: tensor.float() for name, tensor in weights.items()}
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
    return model.eval()


def greedy(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`tokens` greedy tokens for each prompt, past any end token: ids int64 [n, tokens], logits fp32 [n, tokens, V]."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        result = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return result.sequences[:, longest:], torch.stack(result.logits, dim=1).float()


def make_golden(model: Any, tokenizer: Any) -> Golden:
    """Run the reference over `PROMPTS`."""
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    tokens, logits = greedy(model, prompts, TOKENS)
    places = torch.tensor([[prompt, step] for prompt in range(len(prompts)) for step in (0, TOKENS - 1)])
    return Golden(
        prompts=tuple(torch.tensor(prompt, dtype=torch.int32) for prompt in prompts),
        tokens=tokens.int(),
        margins=top2_margin(logits),
        places=places.int(),
        logits=logits[places[:, 0], places[:, 1]].contiguous(),
    )


def save_golden(path: Path, golden: Golden) -> None:
    """Write the vectors as safetensors, with a readable note on how they were made."""
    import transformers
    from safetensors.torch import save

    tensors = {f"prompt.{index}": prompt for index, prompt in enumerate(golden.prompts)}
    tensors |= {name: getattr(golden, name) for name in ("tokens", "margins", "places", "logits")}
    # One entry only: safetensors writes several in no fixed order, and the file would never be the same twice.
    note = {"note": json.dumps({"prompts": PROMPTS, "reference": f"transformers {transformers.__version__}, fp32"})}
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=note))


def load_golden(path: Path) -> Golden:
    """The vectors of an artefact whose files have been checked."""
    from safetensors.torch import load_file

    stored = load_file(path)
    prompts = tuple(stored[f"prompt.{index}"] for index in range(len(stored["tokens"])))
    return Golden(prompts, stored["tokens"], stored["margins"], stored["places"], stored["logits"])
