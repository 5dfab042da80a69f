"""Models of open_clip: `ARCHITECTURE/TAG`, `ARCHITECTURE/FILE`, `local-dir:DIR`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from evaluation.samples import EvaluationError
from evaluation.suite.others import Towers

# Prefixes of names that include the weights.
_WITH_WEIGHTS = ("local-dir:", "hf-hub:")


class DualEncoder(Towers):
    """Towers of open_clip; weights of a tag come from the hub."""

    def __init__(self, name: str) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise EvaluationError(
                "models of open_clip need it: pip install 'vlp[open_clip]', or pip install "
                "open_clip_torch"
            ) from error
        architecture, tag = _split_name(name)
        try:
            with warnings.catch_warnings():
                # Weights trained with another activation load, with only a warning.
                warnings.filterwarnings("error", ".*QuickGELU mismatch")
                model, _, self._transform = open_clip.create_model_and_transforms(
                    architecture, pretrained=tag, **_require_weights(open_clip.create_model)
                )
            self.module: Any = model.eval()
            self._tokenizer = open_clip.get_tokenizer(architecture)
        except (OSError, RuntimeError, ValueError, KeyError, UserWarning) as error:
            reason = " ".join(str(error).split())
            raise EvaluationError(f"open_clip:{name} cannot be loaded: {reason}") from error

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an RGB image: (3, rows, columns) float32."""
        pixels: Tensor = self._transform(image)
        return pixels

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, N) int64, padded to full length, and a mask (B, N) of True."""
        ids: Tensor = self._tokenizer(list(texts)).long()
        # The text encoder finds the end of a text itself.
        return ids, torch.ones_like(ids).bool()

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Count texts without padding: truncated texts, and texts of exactly the full length."""
        return int((self.tokenize(texts)[0][:, -1] != 0).sum())

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, rows, columns) to features (B, d)."""
        feature: Tensor = self.module.encode_image(pixels)
        return feature

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode ids (B, N) to features (B, d)."""
        feature: Tensor = self.module.encode_text(ids)
        return feature


def _require_weights(create: Callable[..., Any]) -> dict[str, bool]:
    """Return the option of recent versions that makes missing weights an error."""
    key = "require_pretrained"
    return {key: True} if key in inspect.signature(create).parameters else {}


def files(name: str) -> list[Path]:
    """Return a model's local files; empty for weights of the hub."""
    architecture, tag = _split_name(name)
    if architecture.startswith("local-dir:"):
        folder = Path(architecture.removeprefix("local-dir:"))
        return sorted(file for file in folder.glob("*") if file.is_file())
    return [Path(tag)] if tag is not None and Path(tag).is_file() else []


def _split_name(name: str) -> tuple[str, str | None]:
    """Return architecture and weights (a tag or file)."""
    if name.startswith(_WITH_WEIGHTS):
        return name, None
    architecture, _, tag = name.partition("/")
    if not tag:
        raise EvaluationError(
            f"open_clip:{name} names no weights; write open_clip:{name}/TAG or "
            f"open_clip:{name}/FILE"
        )
    return architecture, tag
