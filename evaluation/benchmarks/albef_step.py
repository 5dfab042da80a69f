"""A pretraining step beside ALBEF's own, whose code runs as it is, on one thread of a CPU.

    git clone https://github.com/salesforce/ALBEF
    OMP_NUM_THREADS=1 python -m evaluation.benchmarks.albef_step --albef ALBEF

Five tasks in one process train on the same random pairs and take turns step by step, in float32. A
step is forward, backward, AdamW and the momentum teacher's update:

- ALBEF: image-text contrast with teacher and queue, matching with hard negatives, masked language
  modelling with the teacher's predictions (`models/model_pretrain.py`; the optimiser's groups are
  those of its `optim`).
- ours, equal work: the same losses, teacher and layers, in layout `albef`, without gradient
  clipping.
- ours with ACE-RPE: the same with `anchor` in the cross-attention.
- all losses: the default's objectives on top, which are masked image modelling and the token, word
  and phrase terms, with ACE-RPE and clipping.
- all losses, layout `ace`: the default's layout, too, in which patches attend to words.

Sizes are equal: depths, widths, heads, pixels, ids, queue. ALBEF's code has the sizes of its image
encoder written into it; they are bound from outside, as are the weights, which are random. Dropout
is off on both sides. The vocabulary shrinks with the width, so that the decoder's share of a step
is that of width 768. Texts are as long as COCO's; ALBEF's batch ends at its longest text, as its
tokenizer leaves it, ours is as the loader leaves it, of `--max-tokens`.

Classes and functions that ALBEF imports from transformers 4.8 and that newer versions lack are
stood in for; none of them computes in a step but `apply_chunking_to_forward`, which calls.

Prints a table and, last, one JSON line per figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from evaluation.benchmarks import harness
from evaluation.benchmarks.gpu.equal_work import (
    ALL,
    ALPHA,
    ANCHORED,
    MASKED,
    MOMENTUM,
    OwnStep,
    StepSizes,
    caption_lengths,
    variants,
)
from evaluation.benchmarks.harness import Measurement
from evaluation.benchmarks.pretrain_step import random_batch
from vlp.config import ConfigError
from vlp.data.stream.batch import Batch
from vlp.training.engines.environment import free_port, keep_freed_memory

ALBEF = "ALBEF"
TARGETS = {ANCHORED: 1.0, ALL: 0.75}
WARM_UP = 2
_PAD, _CLS, _MASK = 0, 2, 4


class AlbefStep:
    """ALBEF's: the model of its checkout with the optimiser of its recipe.

    Raises:
        ConfigError: the folder holds no checkout of ALBEF.
    """

    def __init__(self, folder: Path, sizes: StepSizes, batch: Batch) -> None:
        module = import_albef(folder)
        torch.manual_seed(0)
        self.model = build_albef(module, sizes).train()
        self.optimiser = torch.optim.AdamW(_albef_groups(self.model), lr=1e-4)
        longest = int(batch.attention_mask.sum(1).amax())
        self.pixels = batch.pixels
        self.text = types.SimpleNamespace(
            input_ids=batch.text_ids[:, :longest],
            attention_mask=batch.attention_mask[:, :longest].long(),
        )

    def losses(self) -> dict[str, float]:
        """Return the losses of the batch by name; weights stay, teacher and queue move."""
        names = ("mlm", "contrastive", "itm")
        found = self.model(self.pixels, self.text, alpha=ALPHA)
        return {name: float(loss.detach()) for name, loss in zip(names, found)}

    def step(self) -> float:
        """Train once, as the loop of its `Pretrain.py` does; return the seconds."""
        started = time.perf_counter()
        self.optimiser.zero_grad()
        mlm, contrastive, itm = self.model(self.pixels, self.text, alpha=ALPHA)
        (mlm + contrastive + itm).backward()
        self.optimiser.step()
        return time.perf_counter() - started


def import_albef(folder: Path) -> types.ModuleType:
    """Import `models.model_pretrain` of a checkout, with stand-ins for what is gone since.

    Raises:
        ConfigError: the folder holds no checkout of ALBEF.
    """
    if not (folder / "models" / "model_pretrain.py").is_file():
        raise ConfigError(f"--albef {folder}: no models/model_pretrain.py there; clone ALBEF")
    with ExitStack() as stack:
        for place, stand_ins in STAND_INS.items():
            # Entered in a dictionary, so that what is not there need not be.
            names = vars(importlib.import_module(f"transformers.{place}"))
            stack.enter_context(mock.patch.dict(names, stand_ins))
        stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        return importlib.import_module("models.model_pretrain")


class FormerPreTrainedModel(nn.Module):
    """Stand-in for the base class of transformers 4.8: what ALBEF's BERT calls of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_pretrained(cls, name: str, config: Any) -> FormerPreTrainedModel:
        """Return random weights; there are none of these sizes."""
        return cls(config)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return next(self.parameters()).dtype

    def init_weights(self) -> None:
        """Initialise all modules, and tie the decoder to the words as `tie_weights` did."""
        self.apply(self._init_weights)  # type: ignore[arg-type]
        decoder = getattr(self, "get_output_embeddings", None)
        if decoder is not None:
            bert: Any = self.bert
            decoder().weight = bert.get_input_embeddings().weight

    def get_head_mask(self, head_mask: None, layers: int) -> list[None]:
        """Return no mask for every layer."""
        return [None] * layers

    def invert_attention_mask(self, mask: Tensor) -> Tensor:
        """Turn a mask (B, K), 1 = may be attended to, into a bias (B, 1, 1, K)."""
        return (1.0 - mask[:, None, None, :].to(self.dtype)) * torch.finfo(self.dtype).min


def _in_one_chunk(
    forward: Callable[..., Tensor], chunk_size: int, dimension: int, *inputs: Tensor
) -> Tensor:
    assert chunk_size == 0
    return forward(*inputs)


def _never(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("no step of ALBEF's calls this")


def _undocumented(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda function: function


STAND_INS: dict[str, dict[str, Any]] = {
    "modeling_utils": {
        "PreTrainedModel": FormerPreTrainedModel,
        "apply_chunking_to_forward": _in_one_chunk,
        "find_pruneable_heads_and_indices": _never,
        "prune_linear_layer": _never,
    },
    "file_utils": {"add_code_sample_docstrings": _undocumented},
}
"""What ALBEF's import finds in place of transformers' own, by module; gone again afterwards."""


def build_albef(module: types.ModuleType, sizes: StepSizes) -> nn.Module:
    """Make ALBEF's pretraining model with random weights, and a group of one process for it."""
    if not torch.distributed.is_initialized():
        address = f"tcp://127.0.0.1:{free_port()}"
        torch.distributed.init_process_group("gloo", address, rank=0, world_size=1)
    tower = {"embed_dim": sizes.width, "depth": sizes.image_layers, "num_heads": sizes.heads}
    vision = module.VisionTransformer

    def vision_of_sizes(**options: Any) -> nn.Module:
        return vision(**options | tower)

    bert = {
        "hidden_size": sizes.width,
        "encoder_width": sizes.width,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.width,
        "num_hidden_layers": sizes.text_layers + sizes.cross_layers,
        "fusion_layer": sizes.text_layers,
        "vocab_size": sizes.vocabulary,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    special = types.SimpleNamespace(pad_token_id=_PAD, cls_token_id=_CLS, mask_token_id=_MASK)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(bert, file)
        file.flush()
        config = {
            "mlm_probability": MASKED,
            "embed_dim": 256,
            "image_res": sizes.image_size,
            "vision_width": sizes.width,
            "bert_config": file.name,
            "temp": 0.07,
            "queue_size": sizes.queue,
            "momentum": MOMENTUM,
        }
        with mock.patch.object(module, "VisionTransformer", vision_of_sizes):
            return module.ALBEF(text_encoder="", tokenizer=special, config=config, init_deit=False)


def _albef_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay as in its recipe: none for vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors, others = [p for p in trained if p.ndim < 2], [p for p in trained if p.ndim > 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.02}]


class Speeds(NamedTuple):
    """Losses and seconds of timed steps by task."""

    losses: dict[str, dict[str, float]]
    seconds: dict[str, list[float]]

    def ratios(self, name: str) -> list[float]:
        """ALBEF's time through that of a task, turn by turn: how many times as fast it is."""
        return [a / b for a, b in zip(self.seconds[ALBEF], self.seconds[name])]


def measure(folder: Path, sizes: StepSizes, turns: int) -> Speeds:
    """Time all tasks by turns; losses are those before the first step."""
    configs = variants(sizes)
    batch = random_batch(configs[ALL].inputs, sizes.rows, caption_lengths(sizes.rows))
    tasks: dict[str, OwnStep | AlbefStep] = {ALBEF: AlbefStep(folder, sizes, batch)}
    tasks |= {name: OwnStep(config, batch) for name, config in configs.items()}
    losses = {name: task.losses() for name, task in tasks.items()}
    steps = {name: task.step for name, task in tasks.items()}
    return Speeds(losses, harness.interleave(steps, turns, WARM_UP))


def table(found: Speeds) -> str:
    """Lay out a line a task: medians with quartiles, and the ratio to ALBEF's; then the losses."""
    rows, losses = [], []
    for name, seconds in found.seconds.items():
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        less, ratio, more = np.quantile(found.ratios(name), (0.25, 0.5, 0.75))
        spread = "" if name == ALBEF else f"{ratio:.2f} ({less:.2f}-{more:.2f})"
        rows.append([name, f"{1e3 * middle:.0f}", f"{1e3 * low:.0f}-{1e3 * high:.0f}", spread])
        parts = ", ".join(f"{part} {loss:.3f}" for part, loss in found.losses[name].items())
        losses.append(f"{name}: {parts}")
    head = ["step", "ms", "quartiles", "times ALBEF's speed"]
    return "\n".join([harness.table(head, rows), "", *losses])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare ALBEF's folder, the sizes, and how many turns are timed."""
    parser.add_argument("--albef", type=Path, required=True, help="a checkout of ALBEF")
    parser.add_argument("--turns", type=int, default=7)
    for name, value in StepSizes._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Measurement]:
    """Print the table, yield the ratios."""
    torch.set_num_threads(1)
    keep_freed_memory()
    sizes = StepSizes(**{name: getattr(options, name) for name in StepSizes._fields})
    found = measure(options.albef, sizes, options.turns)
    print(table(found), end="\n\n")
    for name in found.seconds:
        key = name.replace(",", "").replace(" ", "_")
        yield Measurement(f"albef_step/{key}", statistics.median(found.seconds[name]), "s")
        if name != ALBEF:
            ratio, target = statistics.median(found.ratios(name)), TARGETS.get(name)
            yield Measurement(f"albef_step/{key}/speed", ratio, "x", target)


main = partial(harness.run_benchmark, __doc__, add_options, run, cpu_only=True)


if __name__ == "__main__":
    sys.exit(main())
