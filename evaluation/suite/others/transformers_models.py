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
from evaluation.suite.others import Towers
from vlp.models.pretrained.load import join_names
from vlp.models.pretrained.local_copy import local_folder
from vlp.models.towers import position_offset

logger = logging.getLogger(__name__)


class DualEncoder(Towers):
    """Towers of a folder, or of a model of the hub."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModel, AutoProcessor

        try:
            folder = local_folder(name)
            # Only safetensors: a pickle could run code.
            model_and_report: Any = AutoModel.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True
            )
            self.module, report = model_and_report
            self.processor: Any = AutoProcessor.from_pretrained(folder)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise EvaluationError(f"transformers:{name} cannot be loaded: {reason}") from error
        if missing := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])}):
            raise EvaluationError(
                f"transformers:{name} is read as a {type(self.module).__name__}, and its files "
                f"lack these weights, which would be random: {join_names(missing)}"
            )
        if unused := sorted(report["unexpected_keys"]):
            logger.warning(
                "transformers:%s: these weights are not used: %s", name, join_names(unused)
            )
        if not (hasattr(self.module, "get_text_features") and hasattr(self.module, "logit_scale")):
            kind = type(self.module).__name__
            raise EvaluationError(
                f"transformers:{name} is a {kind}, not a dual encoder; name a CLIP, a SigLIP or a "
                "VisionTextDualEncoder"
            )

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an RGB image: (3, rows, columns) float32."""
        inputs = self.processor.image_processor(image, return_tensors="pt")
        if extra := sorted(set(inputs) - {"pixel_values"}):
            raise EvaluationError(
                f"a {type(self.module).__name__} reads {', '.join(extra)} in addition to pixels, "
                "which is not supported; name a model with a fixed image size"
            )
        pixels: Tensor = inputs.pixel_values
        return pixels[0]

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, N) int64 and mask (B, N) bool, True = read by the encoder."""
        # Padded to full length: SigLIP reads its padding.
        inputs = self.processor.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._max_tokens,
            return_tensors="pt",
        )  # fmt: skip
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        return ids, torch.ones_like(ids).bool() if self._reads_padding else mask.bool()

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Return the number of texts that `tokenize` truncates."""
        ids_of_texts = (
            self.processor.tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
        )
        return sum(len(ids) > self._max_tokens for ids in ids_of_texts)

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, rows, columns) to features (B, d)."""
        return _pooler_output(self.module.get_image_features(pixel_values=pixels))

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode ids (B, N) and mask (B, N) to features (B, d)."""
        masks = {} if self._reads_padding else {"attention_mask": mask.long()}
        return _pooler_output(self.module.get_text_features(input_ids=ids, **masks))

    @property
    def _max_tokens(self) -> int:
        # 77 is CLIP's length; other text encoders may have hundreds of positions.
        positions = self.module.config.text_config.max_position_embeddings
        return min(positions - position_offset(self.module), 77)

    @property
    def _reads_padding(self) -> bool:
        return str(self.module.config.model_type).startswith("siglip")


def files(name: str) -> list[Path]:
    """Return the model's files on this machine."""
    return sorted(file for file in local_folder(name).iterdir() if file.is_file())


def _pooler_output(out: Any) -> Tensor:
    feature: Tensor = getattr(out, "pooler_output", out)
    return feature
