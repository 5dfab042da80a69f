"""Part C: steps of the work that a step of ALBEF's has, and more.

`evaluation.benchmarks.albef_step` says what each of them computes, and times ALBEF's own beside
them on a CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from evaluation.benchmarks import harness
from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.pretrain_step import Trainee, random_batch
from evaluation.benchmarks.stand_ins import SCALE, SHAPE, SHORTEST
from vlp.config import Precision
from vlp.data.stream.batch import Batch
from vlp.training.config import PretrainConfig

EQUAL, ANCHORED = "ours, equal work", "ours with ACE-RPE"
ALL, ALL_ACE = "all losses", "all losses, layout ace"
BERT_WIDTH, BERT_VOCABULARY = 768, 30522
ALPHA, MOMENTUM, MASKED = 0.4, 0.995, 0.15
_CPU = torch.device("cpu")


def equal_work(setting: Setting) -> Iterator[CheckedFigure]:
    """Time the variants by turns, as written, in sizes of ALBEF's pretraining."""
    rows, precision = setting.middle, setting.precision
    steps = 1 if setting.dry else 5
    sizes = StepSizes(768, 12, 6, 6, 256, rows, 30, 65536)
    if setting.dry:
        sizes = StepSizes(64, 1, 1, 1, 32, rows, 12, 16)
    configs = {
        name: config
        for name, config in variants(sizes, precision).items()
        if name in (EQUAL, ANCHORED, ALL)
    }
    batch = random_batch(configs[ALL].inputs, rows, caption_lengths(rows))
    tasks = {name: OwnStep(config, batch, setting.device) for name, config in configs.items()}
    runs = {name: partial(task.trainee.run, task.batch, steps) for name, task in tasks.items()}
    taken = harness.interleave(runs, 1 if setting.dry else 3, warm_up=1)
    for name, seconds in taken.items():
        speed = rows / statistics.median(seconds)
        yield CheckedFigure(f"ALBEF's sizes, {rows} pairs, {name}", speed, "pairs/s")


class StepSizes(NamedTuple):
    """Sizes of both sides; heads have 64 channels, feed-forwards four times the width."""

    width: int = 384
    image_layers: int = 6
    text_layers: int = 3
    cross_layers: int = 3
    image_size: int = 160
    rows: int = 8
    max_tokens: int = 30
    queue: int = 1024

    @property
    def heads(self) -> int:
        """Attention heads of every layer."""
        return self.width // 64

    @property
    def vocabulary(self) -> int:
        """Word pieces, fewer in proportion to the width."""
        return BERT_VOCABULARY * self.width // BERT_WIDTH


def our_config(
    sizes: StepSizes,
    ace: bool = False,
    every_loss: bool = False,
    layout: str = "albef",
    precision: Precision = "float32",
) -> PretrainConfig:
    """Return the pretraining of equal work; with ACE-RPE, or with every loss of the default."""
    width, heads = sizes.width, sizes.heads
    layer = {"width": width, "heads": heads, "intermediate": 4 * width, "weights": None}
    teacher = {"queue": sizes.queue, "alpha": ALPHA, "momentum": MOMENTUM, "warmup_steps": 0}
    objectives: dict[str, Any] = {"teacher": teacher, "itm": {"group": sizes.rows}}
    objectives["mlm"] = {"probability": MASKED}
    if every_loss:
        objectives["contrastive"] = {"token": {"group": min(16, sizes.rows)}}
    else:
        objectives |= {"contrastive": {"kind": "itc"}, "mim": None}
    return PretrainConfig.model_validate(
        {
            "model": {
                "text": layer
                | {
                    "layers": sizes.text_layers,
                    "vocab_size": sizes.vocabulary,
                    "max_tokens": sizes.max_tokens,
                },
                "image": layer | {"layers": sizes.image_layers, "image_size": sizes.image_size},
                "cross": {
                    "layers": sizes.cross_layers,
                    "heads": heads,
                    "intermediate": 4 * width,
                    "layout": layout,
                    "position": ["anchor"] if ace else [],
                },
            },
            "data": {"sources": [{"path": "none"}], "vocabulary": "none", "canonical_streams": 1},
            "objectives": objectives,
            "training": {
                "batch": sizes.rows,
                "precision": precision,
                "optimiser": {} if every_loss else {"clip": None},
            },
        }
    )


def variants(sizes: StepSizes, precision: Precision = "float32") -> dict[str, PretrainConfig]:
    """Return the configurations of ours by name."""
    make = partial(our_config, sizes, precision=precision)
    return {
        EQUAL: make(),
        ANCHORED: make(ace=True),
        ALL: make(ace=True, every_loss=True),
        ALL_ACE: make(ace=True, every_loss=True, layout="ace"),
    }


def caption_lengths(rows: int, seed: int = 0) -> list[int]:
    """Draw words of captions, [CLS] and [SEP] not counted, as COCO's are long."""
    drawn = SHORTEST + np.random.default_rng(seed).gamma(SHAPE, SCALE, rows)
    return (drawn.astype(int) - 2).tolist()


class OwnStep:
    """A task with its optimiser, a full queue, and the teacher's share at its height."""

    def __init__(self, config: PretrainConfig, batch: Batch, device: torch.device = _CPU) -> None:
        self.trainee = Trainee(config, device)
        teacher, self.batch = self.trainee.task.teacher, batch.to(device)
        assert teacher is not None  # every variant has one
        size, width = teacher.queue.image.shape
        image, text = functional.normalize(torch.randn(2, size, width), dim=-1)
        teacher.queue.push(image, text, image_ids=-1 - torch.arange(size))

    def losses(self) -> dict[str, float]:
        """Return the losses of the batch by name; nothing is trained."""
        found = self.trainee.task(self.batch, 1).losses
        self.trainee.task.after_skip()
        return {name: float(loss) for name, loss in found.items()}

    def step(self) -> float:
        """Train once; return the seconds."""
        return self.trainee.step(self.batch)["step"]
