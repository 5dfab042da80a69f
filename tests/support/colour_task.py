"""A downstream task from outside the package (the colour of an image); its import registers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from PIL import Image
from question_shards import COLOURS
from torch import Tensor, nn
from torch.nn import functional

from evaluation.downstream.registry import register_evaluation
from evaluation.downstream.submissions import Submission, write_json
from evaluation.downstream.task_evaluation import PageAction, Scored, TaskEvaluation
from evaluation.item_results import (
    clustered_figures,
    keep_scores,
)
from vlp.data.downstream.dataset import DownstreamDataset, decoded
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import SkippedSample
from vlp.data.shards.shard_reader import Items
from vlp.data.stream.batch import moved
from vlp.objectives.loss import Loss
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.downstream.task import Downstream, DownstreamConfig

NAMES = tuple(COLOURS)


class ColourConfig(DownstreamConfig):
    kind: Literal["colour"] = "colour"
    smoothing: float = 0.0


class ColourExample(NamedTuple):
    pixels: Tensor
    label: int | None


class ColourBatch(NamedTuple):
    pixels: Tensor
    labels: Tensor
    valid: Tensor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device):
        return moved(self, device)


class ColourDataset(DownstreamDataset[ColourExample, ColourBatch]):
    def make(self, item, number, rng_for=None):
        said = " ".join(captions_of(item.raw.annotation))
        label = next((n for n, name in enumerate(NAMES) if name in said), None)
        image = decoded(item.raw, 1)
        return ColourExample(self.prepare(image, "", number, rng_for)[0], label)

    def blank(self):
        size = self.prepare.evaluate.image_size
        return ColourExample(torch.zeros(3, size, size), 0)

    def batch(self, examples, valid, skipped):
        labels = torch.tensor([-1 if one.label is None else one.label for one in examples])
        return ColourBatch(torch.stack([one.pixels for one in examples]), labels, valid, skipped)


class ColourTask(Downstream):
    metric = "accuracy"

    def __init__(self, config, parts, precision="float32"):
        super().__init__(config, parts, precision)
        self.head = nn.Linear(self.model.config.image.width, len(NAMES))

    def dataset(self, folders, limit=None):
        return ColourDataset(Items(folders, limit=limit), self.text, self.prepare)

    def logits(self, batch):
        return self.head(self.model.encode_image(batch.pixels).states.mean(1))

    def forward(self, batch, step):
        each = functional.cross_entropy(self.logits(batch), batch.labels, reduction="none")
        return self.step_output(
            {"colour": Loss(each.where(batch.valid, 0).sum(), batch.valid.sum())}
        )

    def predict(self, batch):
        return [NAMES[best] for best in self.logits(batch).argmax(-1).tolist()]


def build(config, parts, batch, seed, precision):
    task = ColourTask(config, parts, precision)
    dataset = task.dataset(config.data.train, config.data.limit)
    return task, dataset.batches(config.data, batch, seed)


class ColourEvaluation(TaskEvaluation):
    kind = "colour"
    title = "Colours"
    submission = Submission("key", write_json, lambda row: {row["key"]: row["prediction"]})
    action = PageAction("Colour", "colour", "name colours", "Name", "Colour")

    def row(self, task, item, example, prediction):
        label = None if example.label is None else NAMES[example.label]
        found = {"key": item.raw.key, "text": "\n".join(captions_of(item.raw.annotation))}
        return {**found, "prediction": prediction, "label": label, "image": item.raw.image_name}

    def score(self, task, rows, resamples, **options):
        right = {"accuracy": torch.tensor([r["label"] == r["prediction"] for r in rows]).numpy()}
        keep_scores(rows, right)
        return Scored(clustered_figures(right, [row["image"] for row in rows], {}, resamples))

    def predict_one(self, task, images: Sequence[Image.Image], text, device):
        pixels = task.prepare(images, "", 0, None).to(device)
        batch = ColourBatch(pixels, torch.tensor([0]), torch.ones(1, dtype=torch.bool))
        shares = task.logits(batch).softmax(-1)[0].tolist()
        return sorted(zip(NAMES, shares), key=lambda one: -one[1])


register_task(
    DownstreamTask(
        "colour", ColourConfig, build, ColourTask.restore, TaskCard("colours", text=False)
    )
)
register_evaluation(ColourEvaluation())
