"""Images and captions that were never encoded: random features of the sizes that a model gives.

What re-ranking costs depends on sizes alone, so stand-ins measure it without the hours that an
encoder would take for thousands of images.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evaluation.encoder import Block, BlockCache, Collection
from vlp.config import Precision
from vlp.models.config import ModelConfig
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.itm_scorer import ITMScorer
from vlp.models.vlp import VLPModel

# Tokens of COCO's captions with bert-base-uncased's vocabulary, [CLS] and [SEP] counted: 14.0 in
# the mean, deviation 3.0, none below 9, 5 % above 19 (795 captions).
SHORTEST, SHAPE, SCALE = 9, 2.8, 1.8
_NOISE = 1.5
"""Of a caption's feature against its image's; the nearest of both directions then overlap."""


def random_model(config: ModelConfig) -> VLPModel:
    """A model without public weights whose scores depend on every part of it, ACE-RPE's too."""
    data = config.model_dump()
    data["text"]["weights"] = data["image"]["weights"] = None
    torch.manual_seed(0)
    model = VLPModel(ModelConfig.model_validate(data)).eval()
    with torch.no_grad():
        for name, parameter in model.cross_encoder.named_parameters():
            if "table" in name:
                parameter.normal_(std=0.02)
        model.match_head.weight.normal_(std=config.text.width**-0.5)
        model.anchor_threshold.fill_(0.1)
    return model


class StandIns:
    """Blocks of random features in place of an encoder's, and the `collection` they belong to.

    Args:
        model: gives the sizes.
        images: how many.
        texts: how many; captions are dealt to images in turn.
        batch: rows of a block.
        memory: bytes of kept blocks, for images and for captions each.
        device: where.
        precision: of the cross-modal encoder.
    """

    def __init__(
        self,
        model: VLPModel,
        images: int,
        texts: int,
        *,
        batch: int = 64,
        memory: int,
        device: torch.device,
        precision: Precision = "float32",
    ) -> None:
        config = model.config
        self.itm_scorer = ITMScorer(model)
        self.batch, self.device = batch, device
        self.precision: Precision | None = precision
        self.width, self.embed_dim = config.text.width, config.embed_dim
        self.patches = config.image.grid[0] * config.image.grid[1]
        self.images: BlockCache[int] = BlockCache(self._encode_images, memory)
        self.texts: BlockCache[int] = BlockCache(self._encode_texts, memory)
        draw = np.random.default_rng(0)
        longest = config.text.max_tokens
        lengths = SHORTEST + np.floor(draw.gamma(SHAPE, SCALE, texts)).astype(np.int64)
        self.lengths = np.sort(lengths.clip(max=longest))
        last = np.arange(0, texts, batch) + batch - 1
        self.text_widths = self.lengths[last.clip(max=texts - 1)]
        if self.itm_scorer.reads_padding:
            self.text_widths = np.full_like(self.text_widths, longest)
        self.collection = self._collection(draw, images, texts)

    def text(self, index: int, tokens: int) -> TextFeatures:
        """One caption's features, a single row, padded to `tokens`."""
        block, row = self.collection.text_place[index]
        found = self.texts[int(block)].features.select(torch.tensor([row], device=self.device))
        states, feature, *rest = found
        states, *rest = (_padded(field, self.length(index), tokens) for field in (states, *rest))
        return TextFeatures(states, feature, *rest)

    def length(self, index: int) -> int:
        """Tokens of a caption."""
        block, row = self.collection.text_place[index]
        return int(self.lengths[block * self.batch + row])

    def image(self, index: int) -> ImageFeatures:
        """One image's features, a single row."""
        block, row = self.collection.image_place[index]
        return self.images[int(block)].features.select(torch.tensor([row], device=self.device))

    def _collection(self, draw: np.random.Generator, images: int, texts: int) -> Collection:
        image = torch.from_numpy(draw.standard_normal((images, self.embed_dim), np.float32))
        owner = np.sort(np.arange(texts) % images)
        noise = torch.from_numpy(draw.standard_normal((texts, self.embed_dim), np.float32))
        rank = draw.permutation(texts)
        number = np.arange(images)
        return Collection(
            image=functional.normalize(image, dim=-1).to(self.device),
            text=functional.normalize(image[owner] + _NOISE * noise, dim=-1).to(self.device),
            captions=[""] * texts,
            image_of_text=owner,
            image_place=np.stack([number // self.batch, number % self.batch], axis=1),
            text_place=np.stack([rank // self.batch, rank % self.batch], axis=1),
            skipped={},
            samples=[],
        )

    def _encode_images(self, block: int) -> Block:
        generator = torch.Generator(self.device).manual_seed(2 * block)
        rows = self._rows(block, len(self.collection.image))
        states = self._random(generator, rows, 1 + self.patches, self.width)
        tokens = self._random(generator, rows, self.patches, self.embed_dim)
        feature = states[:, 0, :1]  # never read: the collection has them
        return Block(ImageFeatures(states, feature, functional.normalize(tokens, dim=-1)))

    def _encode_texts(self, block: int) -> Block:
        generator = torch.Generator(self.device).manual_seed(2 * block + 1)
        rows, tokens = self._rows(block, len(self.lengths)), int(self.text_widths[block])
        first = block * self.batch
        length = torch.from_numpy(self.lengths[first : first + rows]).to(self.device)[:, None]
        place = torch.arange(tokens, device=self.device)
        return Block(
            TextFeatures(
                states=(states := self._random(generator, rows, tokens, self.width)),
                feature=states[:, 0, :1],
                tokens=functional.normalize(
                    self._random(generator, rows, tokens, self.embed_dim), dim=-1
                ),
                attention_mask=place < length,
                word_mask=(place > 0) & (place < length - 1),
            )
        )

    def _rows(self, block: int, items: int) -> int:
        return min(self.batch, items - block * self.batch)

    def _random(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=self.device)


def _padded(field: Tensor, length: int, tokens: int) -> Tensor:
    short = (0, tokens - length)
    return functional.pad(field[:, :length], (0, 0, *short) if field.ndim == 3 else short)
