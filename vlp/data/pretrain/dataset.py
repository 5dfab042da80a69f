"""One element of the training order, as the tensors of one slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vlp.data.features.store import SourceFeatures
from vlp.data.image.decode import JpegImage
from vlp.data.image.transforms import TrainTransform, names_a_side
from vlp.data.masking import IGNORED, mask_patches, mask_words
from vlp.data.schema import TextKind, texts_of
from vlp.data.shards.sample_files import BadSample, RawSample, SkippedSample
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.stream.batch import Batch, Inputs
from vlp.data.stream.rng import identity, make_rng
from vlp.data.stream.sampler import Element, Request
from vlp.data.text.tokenizer import TextProcessor
from vlp.data.text.word_boxes import named_patches

NO_ID = -1
_BEGUN_AT_ONCE = 16  # whose encoded images are held
_GREY = torch.tensor(128, dtype=torch.uint8)  # of an empty slot: normalises to about zero


class Slot(NamedTuple):
    """One row of a `Batch`, and the slot's element in one epoch as asked for.

    levels: pixels before they are normalised, (3, height, width) uint8, or stored features
    (tokens, width); None in an empty slot.
    """

    levels: Tensor | None
    text_ids: Tensor
    attention_mask: Tensor
    word_mask: Tensor
    mlm_ids: Tensor
    mlm_labels: Tensor
    mim_mask: Tensor
    image_id: int
    uniform: Tensor
    valid: bool
    sample_id: int
    word_patches: Tensor | None = None
    skip: SkippedSample | None = None


class CaptionedSamples(Dataset[Slot]):
    """Prepares slots; every random choice is drawn from (seed, epoch, element, purpose).

    Args:
        sources: the folders of shards, in the order of the configuration.
        every_caption: whether each caption makes an element; else one is drawn on each visit.
        text: captions to ids.
        transform: images to pixels.
        inputs: patch grid and masking.
        seed: of the run.
        texts: which texts of a sample are its captions.
        features: of each source's images, in place of their pixels; None decodes the images.
    """

    def __init__(
        self,
        sources: Sequence[ShardIndex],
        every_caption: bool,
        text: TextProcessor,
        transform: TrainTransform,
        inputs: Inputs,
        seed: int,
        texts: TextKind = "captions",
        features: Sequence[SourceFeatures] | None = None,
    ) -> None:
        self.sources, self.features = sources, features
        side = transform.preprocessing.image_size
        self._blank = features[0].blank if features else _GREY.expand(3, side, side)
        self.texts = texts
        self.text = text
        self.transform = transform
        self.grid = inputs.grid
        self.inputs = inputs
        self.seed = seed
        self.every_caption = every_caption

    def __getitem__(self, request: Request) -> Slot:
        """Return the slot of a request; a bad sample gives an empty one that says why."""
        return self.__getitems__([request])[0]

    def __getitems__(self, requests: Sequence[Request]) -> list[Slot]:
        """Return the slots of requests, each as `__getitem__` does.

        Of some slots, all else is done before an image is decoded: a decoder leaves none of
        Python's code and data in the CPU's caches, and what stands between two of its calls takes
        three times as long.
        """
        slots: list[Slot] = []
        for start in range(0, len(requests), _BEGUN_AT_ONCE):
            begun = [
                self._begun(request.epoch, request.element)
                if request.element is not None
                else partial(self._empty, None)
                for request in requests[start : start + _BEGUN_AT_ONCE]
            ]
            slots.extend(finish() for finish in begun)
        return slots

    def slot(self, epoch: int, element: Element, raw: RawSample | BadSample | None = None) -> Slot:
        """Return the slot of an element; `raw` is its sample where that was read already."""
        return self._begun(epoch, element, raw)()

    def _begun(
        self, epoch: int, element: Element, raw: RawSample | BadSample | None = None
    ) -> Callable[[], Slot]:
        """Prepare a slot but for the pixels; what is returned decodes them and completes it."""
        try:
            if isinstance(raw, BadSample):
                raise raw
            slot, levels = self._without_levels(epoch, element, raw)
        except BadSample as bad:
            return partial(self._empty, SkippedSample(bad.kind, bad.where))

        def finish() -> Slot:
            try:
                return slot._replace(levels=levels())
            except BadSample as bad:
                return self._empty(SkippedSample(bad.kind, bad.where))

        return finish

    def _without_levels(
        self, epoch: int, element: Element, raw: RawSample | None
    ) -> tuple[Slot, Callable[[], Tensor]]:
        """Return a slot and what decodes its levels; either raises BadSample."""
        source, shard, _, visit = element
        sample, caption_number = self._sample(element)
        if raw is None:
            raw = self.sources[source].read(shard, sample)
        where = f"{self.sources[source].path(shard)}, {raw.key}"
        name = f"{source}:{shard}:{sample}:{caption_number}:{visit}"

        def rng(purpose: str) -> np.random.Generator:
            return make_rng(self.seed, epoch, name, purpose)

        captions = texts_of(raw.annotation, self.texts)
        if caption_number is None and captions:
            several = len(captions) > 1
            caption_number = int(rng("caption").integers(len(captions))) if several else 0
        if caption_number is None or caption_number >= len(captions):
            raise BadSample("no text", where)
        caption = captions[caption_number]
        image = JpegImage(raw.image, where)
        tokens = self.text([caption])
        ids, words = tokens.text_ids[0], tokens.word_mask[0]
        masked, labels = self._mask_words(ids, words, rng)
        levels = self._levels((source, shard, sample), image, caption, where, rng)
        slot = Slot(
            levels=None,
            text_ids=ids,
            attention_mask=tokens.attention_mask[0],
            word_mask=words,
            mlm_ids=masked,
            mlm_labels=labels,
            mim_mask=self._mask_patches(rng),
            image_id=self._image_id(source, shard, raw),
            uniform=torch.from_numpy(rng("itm").random(2)),
            valid=True,
            sample_id=identity("sample", source, shard, sample, self._sample(element)[1] or 0),
            word_patches=self._word_patches(raw, caption_number, caption, image.size),
        )
        return slot, levels

    def _levels(
        self,
        place: tuple[int, int, int],
        image: JpegImage,
        caption: str,
        where: str,
        rng: Callable[[str], np.random.Generator],
    ) -> Callable[[], Tensor]:
        """Make all choices; what is returned decodes the image, or reads stored features."""
        if self.features is None:
            return self.transform.later(image, rng("augment"), caption)
        source, shard, sample = place
        stored = self.features[source]
        views = stored.views(shard, sample, not names_a_side(caption), where)
        return partial(stored.read, shard, sample, int(rng("view").choice(views)))

    def _sample(self, element: Element) -> tuple[int, int | None]:
        """Return the sample's number in its shard; the caption's where each pair is an element."""
        if not self.every_caption:
            return element.position, None
        ends = self.sources[element.source].caption_ends(element.shard)
        sample = int(np.searchsorted(ends, element.position, side="right"))
        return sample, element.position - (int(ends[sample - 1]) if sample else 0)

    def _image_id(self, source: int, shard: int, raw: RawSample) -> int:
        annotation = raw.annotation
        if annotation.image_id is None:
            name = self.sources[source].shards[shard].name
            return identity("place", source, name, raw.key)
        # Two folders may hold the same image (COCO and Visual Genome do): the annotation's own
        # source name comes before the folder's number.
        # (The word is hashed: another one would give every image another number.)
        return identity("picture", annotation.source or source, annotation.image_id)

    def _mask_words(
        self, ids: Tensor, words: Tensor, rng: Callable[[str], np.random.Generator]
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
            rng("mlm"),
        )
        return torch.from_numpy(masked), torch.from_numpy(labels)

    def _word_patches(
        self, raw: RawSample, number: int, caption: str, size: tuple[int, int]
    ) -> Tensor | None:
        if not self.transform.keeps_places:
            return None
        if self.texts != "captions":
            return self._no_words()
        pieces = self.text.words(caption)
        shown = named_patches(raw.annotation, number, pieces, self.text.max_tokens, self.grid, size)
        return torch.from_numpy(shown)

    def _mask_patches(self, rng: Callable[[str], np.random.Generator]) -> Tensor:
        if self.inputs.patch_masking is None:
            return torch.zeros(self.grid, dtype=torch.bool)
        masked = mask_patches(self.grid, *self.inputs.patch_masking, rng("mim"))
        return torch.from_numpy(masked)

    def _no_words(self) -> Tensor:
        patches = self.grid[0] * self.grid[1]
        return torch.zeros(self.text.max_tokens, patches, dtype=torch.int8)

    def _empty(self, skip: SkippedSample | None) -> Slot:
        tokens = self.text([""])
        ids = tokens.text_ids[0]
        return Slot(
            levels=None,
            text_ids=ids,
            attention_mask=tokens.attention_mask[0],
            word_mask=tokens.word_mask[0],
            mlm_ids=ids.clone(),
            mlm_labels=torch.full_like(ids, IGNORED),
            mim_mask=torch.zeros(self.grid, dtype=torch.bool),
            image_id=NO_ID,
            uniform=torch.zeros(2, dtype=torch.float64),
            valid=False,
            sample_id=NO_ID,
            word_patches=self._no_words() if self.transform.keeps_places else None,
            skip=skip,
        )

    def collate(self, slots: Sequence[Slot]) -> Batch:
        """Stack slots into a batch."""
        return Batch(
            pixels=self._pixels(slots),
            text_ids=torch.stack([slot.text_ids for slot in slots]),
            attention_mask=torch.stack([slot.attention_mask for slot in slots]),
            word_mask=torch.stack([slot.word_mask for slot in slots]),
            mlm_ids=torch.stack([slot.mlm_ids for slot in slots]),
            mlm_labels=torch.stack([slot.mlm_labels for slot in slots]),
            mim_mask=torch.stack([slot.mim_mask for slot in slots]),
            image_ids=torch.tensor([slot.image_id for slot in slots], dtype=torch.int64),
            uniform=torch.stack([slot.uniform for slot in slots]),
            valid=torch.tensor([slot.valid for slot in slots], dtype=torch.bool),
            sample_ids=torch.tensor([slot.sample_id for slot in slots], dtype=torch.int64),
            word_patches=_optional([slot.word_patches for slot in slots]),
            skipped=tuple(slot.skip for slot in slots if slot.skip is not None),
            statistics=self.inputs.statistics,
        )

    def _pixels(self, slots: Sequence[Slot]) -> Tensor:
        pixels = _empty((len(slots), *self._blank.shape), self._blank.dtype)
        for slot, row in zip(slots, pixels):
            row.copy_(self._blank if slot.levels is None else slot.levels)
        return pixels


def _optional(fields: Sequence[Tensor | None]) -> Tensor | None:
    there = [field for field in fields if field is not None]
    return torch.stack(there) if there else None


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    # The memory that the main process will read: a batch of images is megabytes, and a worker
    # would otherwise write it twice.
    storage = torch.empty(0).untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
