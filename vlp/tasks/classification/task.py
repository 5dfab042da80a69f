"""Classification of images: a timm model, cross-entropy, and DeiT's mixing of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from timm.models import get_pretrained_cfg
from torch import Tensor

from vlp.config import Config, ConfigError
from vlp.data.labelled_images import open_labelled, require_images
from vlp.data.stream.loader import OrderedData
from vlp.data.stream.rng import make_rng
from vlp.layers.blocks import fuse_by_device
from vlp.models.vision.backbone import BackboneConfig, create_backbone
from vlp.objectives.loss import Loss
from vlp.precision import full_precision
from vlp.tasks.classification.data import LabelledBatch, LabelledDataConfig, labelled_data
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.vision_only import VisionTask


class ClassificationConfig(Config):
    """Model, images and loss. Mixing is drawn per step and rank, so it depends on the ranks.

    Public timm weights get the normalisation of their training, unless `data` has a `mean` or
    `std`.
    """

    kind: Literal["classification"] = Field("classification", description="selects this class")
    model: BackboneConfig = Field(description="timm model and its position encodings")
    data: LabelledDataConfig = Field(description="labelled images")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of the target spread evenly over all classes"
    )
    mixup: float = Field(0.0, ge=0, description="alpha of Beta(alpha, alpha); 0 is off")
    cutmix: float = Field(0.0, ge=0, description="likewise; with both, either half of the steps")

    @model_validator(mode="after")
    def _normalise_as_the_weights(self) -> ClassificationConfig:
        if self.model.pretrained and not {"mean", "std"} & self.data.model_fields_set:
            import vlp.models.vision  # noqa: F401  # registers our names with timm

            cfg = None
            with suppress(RuntimeError):  # where the model is made, the name is refused
                cfg = get_pretrained_cfg(self.model.name)
            if cfg is not None:
                overlay = self.model.options.get("pretrained_cfg_overlay") or {}
                statistics = {
                    name: tuple(overlay.get(name, getattr(cfg, name))) for name in ("mean", "std")
                }
                object.__setattr__(self, "data", self.data.model_copy(update=statistics))
        return self


class Classification(VisionTask):
    """Cross-entropy of one label an image."""

    config_class = ClassificationConfig

    def __init__(
        self,
        config: ClassificationConfig,
        classes: Sequence[str],
        precision: Precision = "float32",
        seed: int = 0,
    ) -> None:
        super().__init__(config, precision)
        self.classes, self.seed = tuple(classes), seed
        self.model = create_backbone(
            config.model, num_classes=len(self.classes), img_size=config.data.image_size
        )

    def forward(self, batch: LabelledBatch, step: int) -> StepOutput:
        """Compute the loss, and the share of right answers where images are not mixed."""
        targets = F.one_hot(batch.labels, len(self.classes)).to(batch.pixels.dtype)
        pixels, targets, mixed = self._mix(batch.pixels, targets, step)
        fuse_by_device(self.model, pixels)
        with self.autocast(pixels.device):
            logits = self.model(pixels)
        (logits,) = full_precision(logits)
        smoothing = self.config.label_smoothing
        targets = targets * (1 - smoothing) + smoothing / len(self.classes)
        nats = -(targets * logits.log_softmax(-1)).sum(-1)
        losses = {"classes": Loss(torch.where(batch.valid, nats, 0).sum(), batch.valid.sum())}
        statistics = {}
        if not mixed:
            statistics["accuracy"] = (logits.argmax(-1) == batch.labels).float().mean()
        return self.step_output(losses, statistics=statistics)

    def metadata(self) -> dict[str, Any]:
        """Return the values that `restore` needs in addition to the configuration."""
        return {"classes": self.classes}

    @classmethod
    def restore(cls, config: ClassificationConfig, metadata: Mapping[str, Any]) -> Self:
        """Make the task that a model folder describes, with fresh weights."""
        model = config.model.model_copy(update={"pretrained": False})
        return cls(config.model_copy(update={"model": model}), metadata["classes"])

    def _mix(self, pixels: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor, bool]:
        """Mix every image with the one at the mirrored place of the batch."""
        mixup, cutmix = self.config.mixup, self.config.cutmix
        if not (self.training and (mixup or cutmix)) or len(pixels) < 2:
            return pixels, targets, False
        rng = make_rng(self.seed, step, 0, "mix")
        cut = bool(cutmix) and (not mixup or rng.random() < 0.5)
        alpha = cutmix if cut else mixup
        share = float(rng.beta(alpha, alpha))
        if cut:
            height, width = pixels.shape[-2:]
            rows, columns = (round(side * (1 - share) ** 0.5) for side in (height, width))
            top = int(rng.integers(height - rows + 1))
            left = int(rng.integers(width - columns + 1))
            box = (..., slice(top, top + rows), slice(left, left + columns))
            mixed = pixels.clone()
            mixed[box] = pixels.flip(0)[box]
            pixels, share = mixed, 1 - rows * columns / (height * width)
        else:
            pixels = share * pixels + (1 - share) * pixels.flip(0)
        return pixels, share * targets + (1 - share) * targets.flip(0), True


def build(
    config: ClassificationConfig, batch: int, seed: int, precision: Precision
) -> tuple[Classification, OrderedData]:
    """Build the task and its training data."""
    images = open_labelled(config.data.train, config.data.classes)
    if len(images.classes) < 2:
        raise ConfigError(
            f"{config.data.train}: all images are of the class {images.classes[0]!r}, there is "
            "nothing to tell apart; is it the folder that holds the class folders?"
        )
    if config.data.classes is None:
        require_images(config.data.train, images.classes)
    open_labelled(config.data.test, images.classes)
    data = labelled_data(images, config.data, batch, seed)
    return Classification(config, images.classes, precision, seed), data
