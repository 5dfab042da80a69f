"""Dual encoders of other libraries, as `open_clip:NAME/TAG` and `transformers:DIR`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from evaluation.samples import EvaluationError
from vlp.data.image.decode import upright_rgb
from vlp.data.text.tokenizer import TextTokens
from vlp.models.config import ModelConfig
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.folder import Loaded


class Towers(Protocol):
    """Image and text encoder of a library, with features of width d."""

    module: Any

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an RGB image: (3, rows, columns) float32."""

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, N) int64 and mask (B, N) bool, True = read by the encoder."""

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Return the number of texts that `tokenize` truncates."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, rows, columns) to features (B, d), not normalised."""

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode ids (B, N) and mask (B, N) to features (B, d), not normalised."""

    def temperature(self) -> Tensor:
        """Return the 0-d divisor of similarities."""
        scale: Tensor = self.module.logit_scale.detach().float()
        return 1 / scale.exp().reshape(())


class ModelAdapter(nn.Module):
    """`Towers` with the interface of VLPModel; states, tokens and cross-modal layers are empty."""

    # The match score, similarity over temperature, is trained.
    match_is_trained = True

    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers, self.module = towers, towers.module
        size = int(towers.preprocess(Image.new("RGB", (32, 32))).shape[-1])
        self.config = ModelConfig.model_validate(
            {
                "image": {"image_size": size, "patch_size": _patch_size(size)},
                # The only setting of the cross-modal encoder that evaluations read.
                "cross": {"position": []},
            }
        )
        self.cross_encoder = nn.Module()
        self.cross_encoder.layers = nn.ModuleList()
        self.register_buffer("anchor_threshold", torch.zeros(()), persistent=False)
        self.eval()

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an image of any mode."""
        return self.towers.preprocess(upright_rgb(image))

    def encode_image(self, pixels: Tensor) -> ImageFeatures:
        """Encode pixels (B, 3, rows, columns); the feature (B, d) has unit length."""
        feature = _unit(self.towers.encode_images(pixels))
        # States (B, 1, 0) and tokens (B, 0, d) are empty.
        return ImageFeatures(feature[:, None, :0], feature, feature[:, None][:, :0])

    def encode_text(self, ids: Tensor, mask: Tensor, word_mask: Tensor) -> TextFeatures:
        """Encode ids and masks (B, N); the feature (B, d) has unit length."""
        feature = _unit(self.towers.encode_texts(ids, mask))
        # States (B, N, 0) and tokens (B, 0, d) are empty.
        states = feature[:, None, :0].expand(-1, ids.shape[1], -1)
        return TextFeatures(states, feature, feature[:, None][:, :0], mask, word_mask)

    def temperature(self) -> Tensor:
        """Return the 0-d divisor of similarities."""
        return self.towers.temperature()

    def match(self, image: ImageFeatures, text: TextFeatures) -> Tensor:
        """Return the similarity of aligned pairs over the temperature, (B,)."""
        return (image.feature * text.feature).sum(-1) / self.temperature()


class TokenizerAdapter:
    """Tokenizer of `Towers` with the interface of TextProcessor."""

    def __init__(self, towers: Towers) -> None:
        self._towers, self.count_truncated = towers, towers.count_truncated

    def __call__(self, texts: Sequence[str]) -> TextTokens:
        """Return ids and masks (B, N) of texts."""
        ids, mask = self._towers.tokenize(list(texts))
        return TextTokens(ids, mask, mask)


def _unit(feature: Tensor) -> Tensor:
    return nn.functional.normalize(feature.float(), dim=-1)


def _patch_size(size: int) -> int:
    """Return a usual patch side that divides the image side, for shuffled views."""
    return next(side for side in (16, 14, 8, 4, 2, 1) if size % side == 0)


# An example for each library X, whose module `X_models` has `DualEncoder(name)` and `files(name)`.
EXAMPLES = {
    "open_clip": "open_clip:ViT-B-32/laion2b_s34b_b79k",
    "transformers": "transformers:openai/clip-vit-base-patch32",
}


class OtherModel(NamedTuple):
    """A library, and the name of a model in the library."""

    library: str
    name: str

    def __str__(self) -> str:
        """Return the model's name on the command line."""
        return f"{self.library}:{self.name}"

    def load(self) -> Loaded:
        """Load model, tokenizer and image preparation, in evaluation mode on the CPU."""
        towers: Towers = self._module().DualEncoder(self.name)
        model = ModelAdapter(towers)
        # Tasks of dual encoders use only the interface of the adapters.
        return Loaded(model, TokenizerAdapter(towers), model.preprocess)  # type: ignore[arg-type]

    def checksum(self) -> str:
        """Hash the model's name and its files on this machine."""
        digest = hashlib.sha256(f"{self}\n".encode())
        for file in self._module().files(self.name):
            with file.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
        return digest.hexdigest()

    def _module(self) -> Any:
        return import_module(f"evaluation.suite.others.{self.library}_models")


def other_model(name: str | Path) -> OtherModel | None:
    """Return the model of another library by name; None for a folder or hub name."""
    library, separator, model_name = str(name).partition(":")
    if not separator or library not in EXAMPLES:
        return None
    if not model_name:
        raise EvaluationError(f"{name}: name a model after the colon, as in {EXAMPLES[library]}")
    return OtherModel(library, model_name)
