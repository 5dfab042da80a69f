"""A downstream task as a plugin: which colour an image's caption names first.

Commands: examples/colour_task.yaml. An explanation: docs/how-to/add-a-task.md.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evaluation.downstream.task_evaluation import Scored, TaskEvaluation, register_evaluation
from evaluation.work_sharding import clustered_figures, set_scores
from vlp.data.downstream.dataset import DownstreamDataset, Items, decode_images
from vlp.data.schema import captions_of
from vlp.data.stream.batch import to_device
from vlp.objectives.loss import Loss
from vlp.tasks.downstream.registry import DownstreamTask, TaskCard, register_task
from vlp.tasks.downstream.task import Downstream, DownstreamConfig

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "gray")


class ColourConfig(DownstreamConfig):
    kind: Literal["colour"] = "colour"


class Batch(NamedTuple):
    pixels: Tensor  # (B, 3, H, W)
    labels: Tensor  # (B,), -1 without a label
    valid: Tensor  # (B,), False where a sample could not be read
    skipped: tuple = ()  # samples that could not be read

    def to(self, device):
        return to_device(self, device)


class ColourData(DownstreamDataset):  # of examples (pixels (3, H, W), colour or None)
    def make(self, item, number, rng_for=None):
        words = " ".join(captions_of(item.raw.annotation)).lower().split()
        colour = next((word for word in words if word in COLOURS), None)
        image = decode_images(item.raw, 1)
        return self.prepare(image, "", number, rng_for)[0], colour

    def blank(self):  # takes the place of a sample that could not be read
        size = self.prepare.evaluate.image_size
        return torch.zeros(3, size, size), None

    def batch(self, examples, valid, skipped):
        pixels, colours = zip(*examples)
        labels = [COLOURS.index(colour) if colour else -1 for colour in colours]
        return Batch(torch.stack(pixels), torch.tensor(labels), valid, skipped)


class ColourTask(Downstream):
    metric = "accuracy"  # chooses the best checkpoint

    def __init__(self, config, parts, precision="float32"):
        super().__init__(config, parts, precision)
        self.head = nn.Linear(self.model.config.image.width, len(COLOURS))

    def dataset(self, folders, limit=None):
        return ColourData(Items(folders, limit=limit), self.text, self.prepare)

    def logits(self, batch):  # a linear head on the mean state of the image encoder
        return self.head(self.model.encode_image(batch.pixels).states.mean(1))

    def forward(self, batch, step):
        logits, labels = self.logits(batch), batch.labels
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return self.step_output({"colour": Loss(loss, batch.valid.sum())})

    def predict(self, batch):
        return [COLOURS[best] for best in self.logits(batch).argmax(-1).tolist()]


def build(config, parts, batch, seed, precision):
    task = ColourTask(config, parts, precision)
    data = task.dataset(config.data.train, config.data.limit)
    return task, data.batches(config.data, batch, seed)


class ColourEvaluation(TaskEvaluation):
    kind, title = "colour", "Colours"

    def row(self, task, item, example, prediction):
        ids = {"key": item.raw.key, "image": item.raw.image_name}
        return ids | {"prediction": prediction, "label": example[1]}

    def score(self, task, rows, resamples, **options):
        right = {"accuracy": np.array([row["label"] == row["prediction"] for row in rows])}
        set_scores(rows, right)
        return Scored(clustered_figures(right, [row["image"] for row in rows], {}, resamples))


card = TaskCard("colours", text=False)
register_task(DownstreamTask("colour", ColourConfig, build, ColourTask.restore, card))
register_evaluation(ColourEvaluation())
