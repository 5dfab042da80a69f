"""One element of the training order, as the tensors of one slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vlp.data.batch import Batch, Skip
from vlp.data.draws import draw, identity
from vlp.data.inputs import Inputs
from vlp.data.masking import IGNORED, mask_patches, mask_words
from vlp.data.named_words import named_patches
from vlp.data.order import Element
from vlp.data.pictures import decode_picture
from vlp.data.schema import captions_of
from vlp.data.shards import ShardIndex
from vlp.data.stored import BadSample, RawSample
from vlp.data.text import TextProcessor
from vlp.data.transforms import TrainTransform

NO_ID = -1


class Slot(NamedTuple):
    """One row of a `Batch`, and the slot's element in one epoch as asked for."""

    pixels: Tensor
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    mlm_ids: Tensor
    mlm_labels: Tensor
    mim_mask: Tensor
    image_id: int
    draws: Tensor
    valid: bool
    sample_id: int
    word_patches: Tensor | None = None
    skip: Skip | None = None


class Request(NamedTuple):
    """What a slot asks for: an element in an epoch, or nothing."""

    epoch: int
    element: Element | None


class CaptionedSamples(Dataset[Slot]):
    """Prepares slots; every random choice is drawn from (seed, epoch, element, purpose).

    Args:
        sources: the folders of shards, in the order of the configuration.
        caption_counts: with `captions: all`, for each source and shard the number of elements of
            each sample; None when a caption is drawn on each visit.
        text: captions to ids.
        transform: pictures to pixels.
        inputs: patch grid and masking.
        seed: of the run.
    """

    def __init__(
        self,
        sources: Sequence[ShardIndex],
        caption_counts: Sequence[Sequence[np.ndarray]] | None,
        text: TextProcessor,
        transform: TrainTransform,
        inputs: Inputs,
        seed: int,
    ) -> None:
        self.sources = sources
        self.text = text
        self.transform = transform
        self.grid = inputs.grid
        self.inputs = inputs
        self.seed = seed
        self._ends = caption_counts and [
            [np.cumsum(counts) for counts in shards] for shards in caption_counts
        ]

    def __getitem__(self, request: Request) -> Slot:
        """The slot of a request; a bad sample gives an empty one that says why."""
        if request.element is None:
            return self._empty(None)
        try:
            return self._slot(request.epoch, request.element)
        except BadSample as bad:
            return self._empty(Skip(bad.kind, bad.where))

    def _slot(self, epoch: int, element: Element) -> Slot:
        source, shard, _, visit = element
        sample, caption_number = self._sample(element)
        raw = self.sources[source].read(shard, sample)
        where = (
            f"{self.sources[source].folder / self.sources[source].shards[shard].name}, {raw.key}"
        )
        name = f"{source}:{shard}:{sample}:{caption_number}:{visit}"

        def rng(purpose: str) -> np.random.Generator:
            return draw(self.seed, epoch, name, purpose)

        captions = captions_of(raw.annotation)
        if caption_number is None and captions:
            caption_number = int(rng("caption").integers(len(captions)))
        if caption_number is None or caption_number >= len(captions):
            raise BadSample("no text", where)
        caption = captions[caption_number]
        image = decode_picture(raw.image, where)
        tokens = self.text([caption])
        ids, words = tokens.text_ids[0], tokens.word_mask[0]
        masked, labels = self._mask_words(ids, words, rng("mlm"))
        return Slot(
            pixels=self.transform(image, rng("augment"), caption),
            text_ids=ids,
            attention_mask=tokens.attention_mask[0],
            word_mask=words,
            mlm_ids=masked,
            mlm_labels=labels,
            mim_mask=self._mask_patches(rng("mim")),
            image_id=self._image_id(source, shard, raw),
            draws=torch.from_numpy(rng("itm").random(2)),
            valid=True,
            sample_id=identity("sample", source, shard, sample, self._sample(element)[1] or 0),
            word_patches=self._word_patches(raw, caption_number, caption, image.size),
        )

    def _sample(self, element: Element) -> tuple[int, int | None]:
        """The sample's number in its shard, and the caption's where each pair is an element."""
        if self._ends is None:
            return element.position, None
        ends = self._ends[element.source][element.shard]
        sample = int(np.searchsorted(ends, element.position, side="right"))
        return sample, element.position - (int(ends[sample - 1]) if sample else 0)

    def _image_id(self, source: int, shard: int, raw: RawSample) -> int:
        annotation = raw.annotation
        if annotation.image_id is None:
            name = self.sources[source].shards[shard].name
            return identity("place", source, name, raw.key)
        # Two folders may hold the same picture (COCO and Visual Genome do): the annotation's own
        # source name comes before the folder's number.
        return identity("picture", annotation.source or source, annotation.image_id)

    def _mask_words(
        self, ids: Tensor, words: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        if self.inputs.word_masking is None:
            return ids.clone(), torch.full_like(ids, IGNORED)
        masked, labels = mask_words(
            ids.numpy(),
            words.numpy(),
            self.inputs.word_masking,
            self.text.vocab_size,
            self.text.mask_id,
            self.text.special_ids,
            rng,
        )
        return torch.from_numpy(masked), torch.from_numpy(labels)

    def _word_patches(
        self, raw: RawSample, number: int, caption: str, size: tuple[int, int]
    ) -> Tensor | None:
        if not self.transform.keeps_places:
            return None
        pieces = self.text.words(caption)
        shown = named_patches(raw.annotation, number, pieces, self.text.max_tokens, self.grid, size)
        return torch.from_numpy(shown)

    def _mask_patches(self, rng: np.random.Generator) -> Tensor:
        if self.inputs.patch_masking is None:
            return torch.zeros(self.grid, dtype=torch.bool)
        return torch.from_numpy(mask_patches(self.grid, *self.inputs.patch_masking, rng))

    def _no_words(self) -> Tensor:
        patches = self.grid[0] * self.grid[1]
        return torch.zeros(self.text.max_tokens, patches, dtype=torch.int8)

    def _empty(self, skip: Skip | None) -> Slot:
        tokens = self.text([""])
        ids = tokens.text_ids[0]
        size = self.transform.preprocessing.image_size
        return Slot(
            pixels=torch.zeros(3, size, size),
            text_ids=ids,
            attention_mask=tokens.attention_mask[0],
            word_mask=tokens.word_mask[0],
            mlm_ids=ids.clone(),
            mlm_labels=torch.full_like(ids, IGNORED),
            mim_mask=torch.zeros(self.grid, dtype=torch.bool),
            image_id=NO_ID,
            draws=torch.zeros(2, dtype=torch.float64),
            valid=False,
            sample_id=NO_ID,
            word_patches=self._no_words() if self.transform.keeps_places else None,
            skip=skip,
        )


def collate(slots: Sequence[Slot]) -> Batch:
    """Stack slots into a batch."""
    return Batch(
        pixels=_stack([slot.pixels for slot in slots]),
        text_ids=torch.stack([slot.text_ids for slot in slots]),
        attention_mask=torch.stack([slot.attention_mask for slot in slots]),
        word_mask=torch.stack([slot.word_mask for slot in slots]),
        mlm_ids=torch.stack([slot.mlm_ids for slot in slots]),
        mlm_labels=torch.stack([slot.mlm_labels for slot in slots]),
        mim_mask=torch.stack([slot.mim_mask for slot in slots]),
        image_ids=torch.tensor([slot.image_id for slot in slots], dtype=torch.int64),
        draws=torch.stack([slot.draws for slot in slots]),
        valid=torch.tensor([slot.valid for slot in slots], dtype=torch.bool),
        sample_ids=torch.tensor([slot.sample_id for slot in slots], dtype=torch.int64),
        word_patches=_optional([slot.word_patches for slot in slots]),
        skipped=tuple(slot.skip for slot in slots if slot.skip is not None),
    )


def _optional(fields: Sequence[Tensor | None]) -> Tensor | None:
    there = [field for field in fields if field is not None]
    return torch.stack(there) if there else None


def _stack(pixels: list[Tensor]) -> Tensor:
    if get_worker_info() is None:
        return torch.stack(pixels)
    # Straight into the memory that the main process will read: a batch of pictures is tens of
    # megabytes, and a worker would otherwise write it twice.
    first = pixels[0]
    storage = first.untyped_storage()._new_shared(len(pixels) * first.nbytes)
    shared = torch.empty(0, dtype=first.dtype).set_(storage).view(len(pixels), *first.shape)
    return torch.stack(pixels, out=shared)
