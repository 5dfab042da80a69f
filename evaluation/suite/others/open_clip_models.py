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

_WHOLE = ("local-dir:", "hf-hub:")


class OpenClipTowers:
    """Towers as `evaluation.suite.others.Towers` describes them."""

    def __init__(self, name: str) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise EvaluationError(
                "models of open_clip need it: pip install 'vlp[open_clip]', or pip install "
                "open_clip_torch"
            ) from error
        architecture, tag = _parts(name)
        try:
            with warnings.catch_warnings():
                # Weights of another activation fit, and the library only warns.
                warnings.filterwarnings("error", ".*QuickGELU mismatch")
                parts = open_clip.create_model_and_transforms(
                    architecture, pretrained=tag, **_required(open_clip.create_model)
                )
            self.module: Any = parts[0].eval()
            self._tokenizer = open_clip.get_tokenizer(architecture)
        except (OSError, RuntimeError, ValueError, KeyError, UserWarning) as error:
            reason = " ".join(str(error).split())
            raise EvaluationError(f"open_clip:{name} cannot be loaded: {reason}") from error
        self._transform = parts[2]
        self.image_size = int(self.preprocess(Image.new("RGB", (32, 32))).shape[-1])

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an RGB image: (3, rows, columns) float32."""
        pixels: Tensor = self._transform(image)
        return pixels

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, N) int64, and which are read (B, N) bool."""
        ids: Tensor = self._tokenizer(list(texts)).long()
        # Their text towers take texts of full length, and find the end by themselves.
        return ids, torch.ones_like(ids).bool()

    def count_cut(self, texts: Sequence[str]) -> int:
        """Count the texts that fill all tokens, as ends of texts are unknown."""
        return int((self.tokenize(texts)[0][:, -1] != 0).sum())

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, rows, columns) to (B, d)."""
        feature: Tensor = self.module.encode_image(pixels)
        return feature

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode ids (B, N) with their mask (B, N) to (B, d)."""
        feature: Tensor = self.module.encode_text(ids)
        return feature

    def temperature(self) -> Tensor:
        """Return the divisor of similarities, a number."""
        scale: Tensor = self.module.logit_scale.detach().float()
        return 1 / scale.exp().reshape(())


def _required(create: Callable[..., Any]) -> dict[str, bool]:
    """Return the option of recent versions that makes missing weights an error."""
    key = "require_pretrained"
    return {key: True} if key in inspect.signature(create).parameters else {}


def towers(name: str) -> OpenClipTowers:
    """Load a model; weights that a tag names come from the hub."""
    return OpenClipTowers(name)


def files(name: str) -> list[Path]:
    """Return the files of a name on this machine."""
    architecture, tag = _parts(name)
    if architecture.startswith("local-dir:"):
        folder = Path(architecture.removeprefix("local-dir:"))
        return sorted(file for file in folder.glob("*") if file.is_file())
    return [Path(tag)] if tag is not None and Path(tag).is_file() else []


def _parts(name: str) -> tuple[str, str | None]:
    """Return architecture and weights."""
    if name.startswith(_WHOLE):
        return name, None
    architecture, _, tag = name.partition("/")
    if not tag:
        raise EvaluationError(
            f"open_clip:{name} names no weights; write open_clip:{name}/TAG or "
            f"open_clip:{name}/FILE"
        )
    return architecture, tag
