"""Models of other libraries, evaluated as own ones: `open_clip:NAME/TAG`, `transformers:DIR`."""

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
    """Encoders of images and of texts into one space, of width d, from a library's file."""

    module: nn.Module
    # Pixels of a side.
    image_size: int

    def preprocess(self, image: Image.Image) -> Tensor:
        """Prepare an RGB image: (3, rows, columns) float32."""

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, N) int64, and which are read (B, N) bool."""

    def count_cut(self, texts: Sequence[str]) -> int:
        """Count the texts that have more tokens than are read."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode (B, 3, rows, columns) to (B, d), of any length."""

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode ids (B, N) and mask (B, N) to (B, d), of any length."""

    def temperature(self) -> Tensor:
        """Return the divisor of similarities."""


class AdaptedModel(nn.Module):
    """A model with features and a temperature; it has no states, tokens or cross-modal layers."""

    # Match log-odds are the similarity over the trained temperature.
    match_is_trained = True

    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers, self.module = towers, towers.module
        size = towers.image_size
        self.config = ModelConfig.model_validate(
            {
                "image": {"image_size": size, "patch_size": next(_divisors(size))},
                # Of its settings evaluations read this alone.
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
        """Encode pixels (B, 3, rows, columns)."""
        feature = _unit(self.towers.encode_images(pixels))
        return ImageFeatures(feature[:, None, :0], feature, feature[:, None][:, :0])

    def encode_text(self, ids: Tensor, mask: Tensor, word_mask: Tensor) -> TextFeatures:
        """Encode texts as `tokenize` gives them."""
        feature = _unit(self.towers.encode_texts(ids, mask))
        states = feature[:, None, :0].expand(-1, ids.shape[1], -1)
        return TextFeatures(states, feature, feature[:, None][:, :0], mask, word_mask)

    def temperature(self) -> Tensor:
        """Return the divisor of similarities."""
        return self.towers.temperature()

    def match(self, image: ImageFeatures, text: TextFeatures) -> Tensor:
        """Return the similarity of aligned pairs over the temperature, (B,)."""
        return (image.feature * text.feature).sum(-1) / self.temperature()


class OtherTexts:
    """Tokenizer of another library: ids and masks (B, N) of texts."""

    def __init__(self, towers: Towers) -> None:
        self._towers, self.count_cut = towers, towers.count_cut

    def __call__(self, texts: Sequence[str]) -> TextTokens:
        """Return ids and masks of texts."""
        ids, mask = self._towers.tokenize(list(texts))
        return TextTokens(ids, mask, mask)


def _unit(feature: Tensor) -> Tensor:
    return nn.functional.normalize(feature.float(), dim=-1)


def _divisors(size: int) -> Any:
    """Return the possible patch sides of shuffled views, the usual one first."""
    return (side for side in (16, 14, 8, 4, 2, 1) if size % side == 0)


# Each is a module `X_models` of this package with `towers(name)` and `files(name)`.
LIBRARIES = ("open_clip", "transformers")


class OtherModel(NamedTuple):
    """A model of another library, and its name there."""

    library: str
    name: str

    def __str__(self) -> str:
        """Return its name on the command line."""
        return f"{self.library}:{self.name}"

    def load(self) -> Loaded:
        """Load model, tokenizer and image preparation, in evaluation mode on the CPU."""
        towers: Towers = self._module().towers(self.name)
        model = AdaptedModel(towers)
        # Evaluations by features alone need no more of a model than the adapter has.
        return Loaded(model, OtherTexts(towers), model.preprocess)  # type: ignore[arg-type]

    def checksum(self) -> str:
        """Hash its name and its files on this machine."""
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
    if not separator or library not in LIBRARIES:
        return None
    if not model_name:
        raise EvaluationError(f"{name}: name a model behind the colon, as in {EXAMPLES[library]}")
    return OtherModel(library, model_name)


EXAMPLES = {
    "open_clip": "open_clip:ViT-B-32/laion2b_s34b_b79k",
    "transformers": "transformers:openai/clip-vit-base-patch32",
}
