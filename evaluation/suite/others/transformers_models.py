"""Dual encoders of transformers: CLIP, SigLIP, and a vision tower with a text tower."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from evaluation.samples import EvaluationError
from vlp.models.pretrained.load import listed
from vlp.models.pretrained.local_copy import local_folder
from vlp.models.towers import position_offset

logger = logging.getLogger(__name__)


class TransformersTowers:
    """Towers as `evaluation.suite.others.Towers` describes them."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModel, AutoProcessor

        try:
            folder = local_folder(name)
            # No pickle, and no code of the folder.
            loaded: Any = AutoModel.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True
            )
            self.module, report = loaded
            self.processor: Any = AutoProcessor.from_pretrained(folder)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise EvaluationError(f"transformers:{name} cannot be loaded: {reason}") from error
        if missing := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])}):
            raise EvaluationError(
                f"transformers:{name} is read as a {type(self.module).__name__}, and its files "
                f"lack these weights, which would be random: {listed(missing)}"
            )
        if unused := sorted(report["unexpected_keys"]):
            logger.warning("transformers:%s: these weights are not used: %s", name, listed(unused))
        if not (hasattr(self.module, "get_text_features") and hasattr(self.module, "logit_scale")):
            kind = type(self.module).__name__
            raise EvaluationError(
                f"transformers:{name} is a {kind}, no dual encoder; give a CLIP, a SigLIP or a "
                "VisionTextDualEncoder"
            )
        grey = Image.new("RGB", (32, 32))
        self.image_size = int(self.preprocess(grey).shape[-1])

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an RGB image: (3, rows, columns) float32."""
        inputs = self.processor.image_processor(image, return_tensors="pt")
        if extra := sorted(set(inputs) - {"pixel_values"}):
            raise EvaluationError(
                f"a {type(self.module).__name__} reads {', '.join(extra)} beside the pixels of an "
                "image, which is not supported; give a model of one image size"
            )
        pixels: Tensor = inputs.pixel_values
        return pixels[0]

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, N) int64, and which are read (B, N) bool."""
        # SigLIP reads its padding, and was trained on its full length.
        inputs = self.processor.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._max_tokens,
            return_tensors="pt",
        )  # fmt: skip
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        return ids, torch.ones_like(ids).bool() if self._reads_padding else mask.bool()

    def count_cut(self, texts: Sequence[str]) -> int:
        """Count the texts that have more tokens than are read."""
        whole = self.processor.tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
        return sum(len(ids) > self._max_tokens for ids in whole)

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, rows, columns) to (B, d)."""
        return _pooled(self.module.get_image_features(pixel_values=pixels))

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode ids (B, N) with their mask (B, N) to (B, d)."""
        masked = {} if self._reads_padding else {"attention_mask": mask.long()}
        return _pooled(self.module.get_text_features(input_ids=ids, **masked))

    def temperature(self) -> Tensor:
        """Return the divisor of similarities, a number."""
        scale: Tensor = self.module.logit_scale.detach().float()
        return 1 / scale.exp().reshape(())

    @property
    def _max_tokens(self) -> int:
        """Return the maximal number of tokens of a text."""
        positions = self.module.config.text_config.max_position_embeddings
        return min(positions - position_offset(self.module), 77)

    @property
    def _reads_padding(self) -> bool:
        return str(self.module.config.model_type).startswith("siglip")


def towers(name: str) -> TransformersTowers:
    """Load a folder, or a model of the hub."""
    return TransformersTowers(name)


def files(name: str) -> list[Path]:
    """Return its files on this machine."""
    return sorted(file for file in local_folder(name).iterdir() if file.is_file())


def _pooled(out: Any) -> Tensor:
    feature: Tensor = getattr(out, "pooler_output", out)
    return feature
