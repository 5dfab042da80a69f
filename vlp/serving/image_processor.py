"""Preparation of images as an image processor of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoImageProcessor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from vlp.data.image.decode import as_images
from vlp.data.image.transforms import MEAN, STD, Preprocessing
from vlp.models.pretrained.local_copy import hub_options, local_folder
from vlp.serving.config import PROCESSOR_OPTIONS, VlpConfig, require_options


class VlpImageProcessor(BaseImageProcessor):
    """`Preprocessing` of a model folder as an image processor of transformers."""

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        size: Mapping[str, int] | None = None,
        image_mean: Sequence[float] = MEAN,
        image_std: Sequence[float] = STD,
        **options: Any,
    ) -> None:
        # `options` of other image processors change nothing.
        super().__init__(**options)
        self.size = dict(size or {"height": 224, "width": 224})
        self.image_mean, self.image_std = list(image_mean), list(image_std)

    @property
    def preprocessing(self) -> Preprocessing:
        """Return the same preparation as `vlp.load` does."""
        height, width = self.size["height"], self.size["width"]
        if height != width:
            raise ValueError(f"size is {height} x {width}; set a square size")
        (red, green, blue), (*std,) = self.image_mean, self.image_std
        return Preprocessing(height, (red, green, blue), (std[0], std[1], std[2]))

    def preprocess(
        self, images: Any, return_tensors: str | None = None, **options: Any
    ) -> BatchFeature:
        """Prepare images, as `as_images` takes them: pixel_values (B, 3, height, width) float32.

        `options` are ignored, so that images are prepared as in training.
        """
        prepare = self.preprocessing
        pixels = torch.stack([prepare(image) for image in as_images(images)])
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors or "pt")

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any
    ) -> Self:
        """Read the preprocessing of a model folder, local or from the hub."""
        hub = hub_options(options)
        require_options(options, PROCESSOR_OPTIONS)
        folder = local_folder(os.fspath(pretrained_model_name_or_path), **hub)
        loaded = Preprocessing.load(folder)
        size = {"height": loaded.image_size, "width": loaded.image_size}
        return cls(size, loaded.mean, loaded.std)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write `processor_config.json`; with `push_to_hub` upload it, too."""
        self.preprocessing.save(Path(save_directory))
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)


try:
    AutoImageProcessor.register(
        VlpConfig,
        image_processor_classes={"pil": VlpImageProcessor, "torchvision": VlpImageProcessor},
        exist_ok=True,
    )
except TypeError:
    # transformers 5.0 has a slow and a fast class.
    AutoImageProcessor.register(
        VlpConfig, slow_image_processor_class=VlpImageProcessor, exist_ok=True
    )
