"""Image classification: a timm model, cross-entropy, mixup and CutMix."""

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
from vlp.layers.blocks import set_fused_attention
from vlp.models.vision.backbone import BackboneConfig, create_backbone
from vlp.objectives.loss import Loss
from vlp.precision import full_precision
from vlp.tasks.classification.data import LabelledBatch, LabelledDataConfig, labelled_data
from vlp.tasks.task import Precision, StepOutput
from vlp.tasks.vision_only import VisionTask


class ClassificationConfig(Config):
    """Model, images and loss.

    Mixing pairs the images of a rank, so results depend on the number of ranks. Public weights
    bring the defaults of `data.mean` and `data.std`.
    """

    kind: Literal["classification"] = Field("classification", description="selects this class")
    model: BackboneConfig = Field(description="timm model and its position encodings")
    data: LabelledDataConfig = Field(description="labelled images")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of the target spread evenly over all classes"
    )
    mixup: float = Field(0.0, ge=0, description="alpha of mixup's Beta(alpha, alpha); 0 is off")
    cutmix: float = Field(
        0.0, ge=0, description="alpha of CutMix; 0 is off; with mixup, each step draws one of both"
    )

    @model_validator(mode="after")
    def _use_statistics_of_weights(self) -> ClassificationConfig:
        if self.model.pretrained and not {"mean", "std"} & self.data.model_fields_set:
            import vlp.models.vision  # noqa: F401  # registers our names with timm

            cfg = None
            with suppress(RuntimeError):  # unknown name: `create_backbone` refuses it later
                cfg = get_pretrained_cfg(self.model.name)
            if cfg is not None:
                overlay = self.model.options.get("pretrained_cfg_overlay") or {}
                statistics = {
                    name: tuple(overlay.get(name, getattr(cfg, name))) for name in ("mean", "std")
                }
                object.__setattr__(self, "data", self.data.model_copy(update=statistics))
        return self


class Classification(VisionTask):
    """Cross-entropy of one label per image."""

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
        """Compute the loss in nats per image, and the accuracy unless images are mixed."""
        targets = F.one_hot(batch.labels, len(self.classes)).to(batch.pixels.dtype)
        pixels, targets, is_mixed = self._mix(batch.pixels, targets, step)
        set_fused_attention(self.model, pixels)
        with self.autocast(pixels.device):
            logits = self.model(pixels)
        (logits,) = full_precision(logits)
        smoothing = self.config.label_smoothing
        targets = targets * (1 - smoothing) + smoothing / len(self.classes)
        nats = -(targets * logits.log_softmax(-1)).sum(-1)
        losses = {"classes": Loss(torch.where(batch.valid, nats, 0).sum(), batch.valid.sum())}
        statistics = {}
        if not is_mixed:
            # Either all rows are valid, or the batch is a single grey row.
            statistics["accuracy"] = (logits.argmax(-1) == batch.labels).float().mean()
        return self.step_output(losses, statistics=statistics)

    def metadata(self) -> dict[str, Any]:
        """Return the class names."""
        return {"classes": self.classes}

    @classmethod
    def restore(cls, config: ClassificationConfig, metadata: Mapping[str, Any]) -> Self:
        """Create the task of a model folder with initial weights, never public ones."""
        model = config.model.model_copy(update={"pretrained": False})
        return cls(config.model_copy(update={"model": model}), metadata["classes"])

    def _mix(self, pixels: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor, bool]:
        """Mix pixels and targets of row i with row B - 1 - i; also return whether it mixed."""
        mixup, cutmix = self.config.mixup, self.config.cutmix
        if not (self.training and (mixup or cutmix)) or len(pixels) < 2:
            return pixels, targets, False
        rng = make_rng(self.seed, step, 0, "mix")
        is_cutmix = bool(cutmix) and (not mixup or rng.random() < 0.5)
        alpha = cutmix if is_cutmix else mixup
        share = float(rng.beta(alpha, alpha))  # of the row itself; its partner has 1 - share
        if is_cutmix:
            height, width = pixels.shape[-2:]
            rows, columns = (round(side * (1 - share) ** 0.5) for side in (height, width))
            top = int(rng.integers(height - rows + 1))
            left = int(rng.integers(width - columns + 1))
            box = (..., slice(top, top + rows), slice(left, left + columns))
            mixed_pixels = pixels.clone()
            mixed_pixels[box] = pixels.flip(0)[box]
            pixels, share = mixed_pixels, 1 - rows * columns / (height * width)
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
            f"{config.data.train}: all images are of one class, {images.classes[0]!r}; give the "
            "folder that holds the class folders"
        )
    if config.data.classes is None:
        require_images(config.data.train, images.classes)
    open_labelled(config.data.test, images.classes)  # so that its errors come before training
    data = labelled_data(images, config.data, batch, seed)
    return Classification(config, images.classes, precision, seed), data
