"""Batches of pretraining from shards with an index, or resampled from shards without one."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset
from braceexpand import braceexpand
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from vlp.config import ConfigError
from vlp.data.config import DataConfig, SourceConfig
from vlp.data.features.store import HEADER_NAME, SourceFeatures, StoredFeatures, shards_sha256
from vlp.data.image.decode import EncodedImage
from vlp.data.image.transforms import Preprocessing, TrainTransform, mentions_side
from vlp.data.masking import IGNORE_INDEX, mask_patches, mask_words
from vlp.data.schema import TextKind, normalised_caption, texts_of
from vlp.data.shards.index import require_single_split
from vlp.data.shards.remote import (
    DEFAULT_OUTAGES,
    OutageConfig,
    RemoteFolder,
    ShardCache,
    Unreachable,
    file_of,
    is_url,
    with_retries,
)
from vlp.data.shards.sample_files import (
    BadSample,
    DataError,
    RawSample,
    ShardFile,
    SkippedSample,
    outage_error,
)
from vlp.data.shards.shard_reader import ShardIndex
from vlp.data.stream.batch import Batch, Inputs
from vlp.data.stream.loader import OrderedData, concurrent_shards
from vlp.data.stream.rng import make_rng, stable_hash
from vlp.data.stream.sampler import (
    EndlessSampler,
    Request,
    SampleIndex,
    SlidingSampler,
    Source,
    TrainingSampler,
)
from vlp.data.text.tokenizer import TextProcessor
from vlp.data.text.word_boxes import word_patches
from vlp.io import lines_of, redact, sha256_of

NO_ID = -1
_MAX_PENDING = 16  # rows prepared before their images are decoded
_GREY = torch.tensor(128, dtype=torch.uint8)  # pixels of an empty row: about 0 when normalised


class BatchRow(NamedTuple):
    """One row of a `Batch`; an empty row has `valid` False, and `skip` if its sample is bad."""

    # (3, height, width) uint8, or stored features (tokens, width); None in an empty row, and until
    # the image is decoded.
    pixels: Tensor | None
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
    caption_id: int = NO_ID
    skip: SkippedSample | None = None


class CaptionedSamples(Dataset[BatchRow]):
    """Map-style dataset of rows; random choices depend on (seed, epoch, index, purpose).

    every_caption: positions in a shard count (image, caption) pairs instead of samples. features:
    replace decoded images.
    """

    def __init__(
        self,
        indices: Sequence[ShardIndex],
        every_caption: bool,
        tokenizer: TextProcessor,
        transform: TrainTransform,
        inputs: Inputs,
        seed: int,
        text_kind: TextKind = "captions",
        features: Sequence[SourceFeatures] | None = None,
    ) -> None:
        self.indices, self.features = indices, features
        side = transform.preprocessing.image_size
        self._blank = features[0].blank if features else _GREY.expand(3, side, side)
        self.text_kind = text_kind
        self.tokenizer = tokenizer
        self.transform = transform
        # Augmentation moves the patches away from the boxes of the annotation.
        self.has_word_patches = transform.config.keeps_images
        self.grid = inputs.grid
        self.inputs = inputs
        self.seed = seed
        self.every_caption = every_caption

    def __getitem__(self, request: Request) -> BatchRow:
        """Return the row of a request; a bad sample gives an empty row with `skip`."""
        return self.__getitems__([request])[0]

    def __getitems__(self, requests: Sequence[Request]) -> list[BatchRow]:
        # Rows are prepared before their images are decoded: decoding evicts Python's code and data
        # from the CPU's caches, so preparing a row between two images takes three times as long.
        rows: list[BatchRow] = []
        for start in range(0, len(requests), _MAX_PENDING):
            pending = [
                self.prepare(request.epoch, request.sample_index)
                if request.sample_index is not None
                else partial(self._empty_row, None)
                for request in requests[start : start + _MAX_PENDING]
            ]
            rows.extend(finish() for finish in pending)
        return rows

    def prepare(
        self, epoch: int, index: SampleIndex, raw: RawSample | BadSample | None = None
    ) -> Callable[[], BatchRow]:
        """Return a function that decodes the pixels of a sample's row and returns the row.

        Other tensors are computed at once. `raw` saves reading the sample; a BadSample gives an
        empty row.
        """
        if isinstance(raw, BadSample):
            return partial(self._empty_row, SkippedSample(raw.kind, raw.where))
        try:
            row, load_pixels = self._prepare_row(epoch, index, raw)
        except BadSample as bad:
            return partial(self._empty_row, SkippedSample(bad.kind, bad.where))

        def finish() -> BatchRow:
            try:
                return row._replace(pixels=load_pixels())
            except BadSample as bad:
                return self._empty_row(SkippedSample(bad.kind, bad.where))

        return finish

    def _prepare_row(
        self, epoch: int, index: SampleIndex, raw: RawSample | None
    ) -> tuple[BatchRow, Callable[[], Tensor]]:
        """Return a row without pixels, and a function that loads them; both raise BadSample."""
        source, shard, _, source_pass = index
        sample, fixed_caption = self._sample_and_caption(index)
        if raw is None:
            raw = self.indices[source].read(shard, sample)
        rng_key = f"{source}:{shard}:{sample}:{fixed_caption}:{source_pass}"

        def rng(purpose: str) -> np.random.Generator:
            return make_rng(self.seed, epoch, rng_key, purpose)

        captions = texts_of(raw.annotation, self.text_kind)
        caption_index = fixed_caption or 0
        if fixed_caption is None and len(captions) > 1:
            caption_index = int(rng("caption").integers(len(captions)))
        if caption_index >= len(captions):
            raise BadSample("no text", raw.where)
        caption = captions[caption_index]
        image = EncodedImage(raw.image, raw.where)
        tokens = self.tokenizer([caption])
        text_ids, word_mask = tokens.text_ids[0], tokens.word_mask[0]
        mlm_ids, mlm_labels = self._mask_words(text_ids, word_mask, rng)
        # `caption_id` is of what the model sees: captions that differ only in truncated or unknown
        # words are equal.
        is_whole = (
            text_ids[-1] == self.tokenizer.pad_id and not (text_ids == self.tokenizer.unk_id).any()
        )
        visible_caption = caption if is_whole else self.tokenizer.visible_text(caption)
        if self.features is None:
            load_pixels = self.transform.prepare(image, rng("augment"), caption)
        else:
            # Stored views were augmented when they were written.
            stored = self.features[source]
            may_flip = not mentions_side(caption)
            views = stored.views(shard, sample, raw.image, may_flip, raw.where)
            load_pixels = partial(stored.read, shard, sample, int(rng("view").choice(views)))
        row = BatchRow(
            pixels=None,
            text_ids=text_ids,
            attention_mask=tokens.attention_mask[0],
            word_mask=word_mask,
            mlm_ids=mlm_ids,
            mlm_labels=mlm_labels,
            mim_mask=self._mask_patches(rng),
            image_id=self._image_id(source, raw),
            uniform=torch.from_numpy(rng("itm").random(2)),
            valid=True,
            sample_id=stable_hash("sample", source, shard, sample, fixed_caption or 0),
            word_patches=self._word_patches(raw, caption_index, caption, image.size),
            caption_id=stable_hash("caption", normalised_caption(visible_caption)),
        )
        return row, load_pixels

    def _sample_and_caption(self, index: SampleIndex) -> tuple[int, int | None]:
        """Return a sample's number in its shard and its caption's index; None: drawn at random."""
        if not self.every_caption:
            return index.position, None
        ends = self.indices[index.source].caption_ends(index.shard)
        sample = int(np.searchsorted(ends, index.position, side="right"))
        return sample, index.position - (int(ends[sample - 1]) if sample else 0)

    def _image_id(self, source: int, raw: RawSample) -> int:
        annotation = raw.annotation
        if annotation.image_id is None:
            # Crawls hold an image under many names: equal bytes are the same image.
            return stable_hash("bytes", raw.image_digest)
        # The annotation's source name comes before the folder's number, as two folders may hold the
        # same image (COCO and Visual Genome do). "picture" is hashed: renaming it changes all ids.
        return stable_hash("picture", annotation.source or source, annotation.image_id)

    def _mask_words(
        self, text_ids: Tensor, word_mask: Tensor, rng: Callable[[str], np.random.Generator]
    ) -> tuple[Tensor, Tensor]:
        if self.inputs.word_masking is None:
            return text_ids.clone(), torch.full_like(text_ids, IGNORE_INDEX)
        mlm_ids, mlm_labels = mask_words(
            text_ids.numpy(),
            word_mask.numpy(),
            self.inputs.word_masking,
            self.tokenizer.vocab_size,
            self.tokenizer.mask_id,
            self.tokenizer.special_ids,
            rng("mlm"),
        )
        return torch.from_numpy(mlm_ids), torch.from_numpy(mlm_labels)

    def _word_patches(
        self, raw: RawSample, caption_index: int, caption: str, size: tuple[int, int]
    ) -> Tensor | None:
        if not self.has_word_patches:
            return None
        if self.text_kind != "captions":
            return self._blank_word_patches()  # annotations have boxes for words of captions only
        pieces, length = self.tokenizer.pieces(caption), self.tokenizer.max_tokens
        patches = word_patches(raw.annotation, caption_index, pieces, length, self.grid, size)
        return torch.from_numpy(patches)

    def _mask_patches(self, rng: Callable[[str], np.random.Generator]) -> Tensor:
        if self.inputs.patch_masking is None:
            return torch.zeros(self.grid, dtype=torch.bool)
        masked = mask_patches(self.grid, *self.inputs.patch_masking, rng("mim"))
        return torch.from_numpy(masked)

    def _blank_word_patches(self) -> Tensor:
        patches = self.grid[0] * self.grid[1]
        return torch.zeros(self.tokenizer.max_tokens, patches, dtype=torch.int8)

    def _empty_row(self, skip: SkippedSample | None) -> BatchRow:
        tokens = self.tokenizer([""])
        text_ids = tokens.text_ids[0]
        return BatchRow(
            pixels=None,
            text_ids=text_ids,
            attention_mask=tokens.attention_mask[0],
            word_mask=tokens.word_mask[0],
            mlm_ids=text_ids.clone(),
            mlm_labels=torch.full_like(text_ids, IGNORE_INDEX),
            mim_mask=torch.zeros(self.grid, dtype=torch.bool),
            image_id=NO_ID,
            uniform=torch.zeros(2, dtype=torch.float64),
            valid=False,
            sample_id=NO_ID,
            word_patches=self._blank_word_patches() if self.has_word_patches else None,
            skip=skip,
        )

    def collate(self, rows: Sequence[BatchRow]) -> Batch:
        """Stack rows into a batch."""
        patches = [row.word_patches for row in rows if row.word_patches is not None]
        return Batch(
            pixels=self._stack_pixels(rows),
            text_ids=torch.stack([row.text_ids for row in rows]),
            attention_mask=torch.stack([row.attention_mask for row in rows]),
            word_mask=torch.stack([row.word_mask for row in rows]),
            mlm_ids=torch.stack([row.mlm_ids for row in rows]),
            mlm_labels=torch.stack([row.mlm_labels for row in rows]),
            mim_mask=torch.stack([row.mim_mask for row in rows]),
            image_ids=torch.tensor([row.image_id for row in rows], dtype=torch.int64),
            uniform=torch.stack([row.uniform for row in rows]),
            valid=torch.tensor([row.valid for row in rows], dtype=torch.bool),
            sample_ids=torch.tensor([row.sample_id for row in rows], dtype=torch.int64),
            word_patches=torch.stack(patches) if patches else None,
            caption_ids=torch.tensor([row.caption_id for row in rows], dtype=torch.int64),
            skipped=tuple(row.skip for row in rows if row.skip is not None),
            statistics=self.inputs.statistics,
        )

    def _stack_pixels(self, rows: Sequence[BatchRow]) -> Tensor:
        pixels = _empty_tensor((len(rows), *self._blank.shape), self._blank.dtype)
        for row, target in zip(rows, pixels):
            target.copy_(self._blank if row.pixels is None else row.pixels)
        return pixels


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    # Memory shared with the main process: a batch is megabytes, and sending it would copy it again.
    storage = torch.empty(0).untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


# Shards in a row without a good sample that end a run: the store is at fault, not the shards.
_MAX_BAD_SHARDS = 16


class ShardList:
    """Paths or URLs of a folder's shards, of a pattern `cc/{00000..00331}.tar` or a `.txt` list."""

    def __init__(self, path: str, outages: OutageConfig = DEFAULT_OUTAGES) -> None:
        self.outages = outages
        self.shards = _shard_paths(path)
        if not self.shards:
            raise ConfigError(f"{path}: names no shards (*.tar)")

    def sha256(self) -> str:
        """Return a hash of the shards' file names, without their folders."""
        names = [file_of(shard)[1] for shard in self.shards]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()


class ResampledSamples(IterableDataset[BatchRow]):
    """Endless rows of one rank from shards drawn with replacement, `buffer` samples shuffled.

    Each worker of each rank draws its own shards.
    """

    def __init__(
        self,
        lists: Sequence[ShardList],
        weights: Sequence[float],
        samples: CaptionedSamples,
        buffer: int,
        consumed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.lists, self.samples, self.buffer = lists, samples, buffer
        self.consumed, self.rank, self.world_size = consumed, rank, world_size
        sizes = [len(shard_list.shards) for shard_list in lists]
        self._shards = [(source, n) for source, size in enumerate(sizes) for n in range(size)]
        self._weights = [weights[source] for source, _ in self._shards]

    def __iter__(self) -> Iterator[BatchRow]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # The number of a visit to a shard is unique among the workers of all ranks.
        first, stride = self.rank * workers + worker, self.world_size * workers
        visits = itertools.count(first, stride)
        # A resumed run draws other shards: checkpoints do not hold the workers' buffers.
        rng = random.Random(f"{self.samples.seed} {self.consumed} {first} of {stride}")
        read = partial(self._read, rng, visits)
        shuffle = webdataset.shuffle(self.buffer, initial=self.buffer, rng=rng)
        for index, raw in webdataset.DataPipeline(read, shuffle):
            # A worker does not know the epoch: the start's position keys random numbers instead.
            yield self.samples.prepare(self.consumed, index, raw)()

    def _read(
        self, rng: random.Random, visits: Iterator[int]
    ) -> Iterator[tuple[SampleIndex, RawSample | BadSample]]:
        bad_shards, problem = 0, ""
        for visit in visits:
            if bad_shards == _MAX_BAD_SHARDS:
                raise DataError(
                    f"{bad_shards} shards in a row hold no good sample, the last one: {problem}"
                )
            source, shard = rng.choices(self._shards, self._weights)[0]
            path, outages = self.lists[source].shards[shard], self.lists[source].outages
            # Bad until a good sample is read.
            bad_shards, problem = bad_shards + 1, redact(path)
            for position, raw in enumerate(_read_shard(path, outages)):
                if isinstance(raw, RawSample):
                    bad_shards = 0
                else:
                    problem = str(raw)
                # In place of the pass, the visit's number keys the random numbers.
                yield SampleIndex(source, shard, position, source_pass=visit), raw


def _shard_paths(path: str) -> list[str]:
    """Return the shards of a folder, of a pattern with braces, or of a `.txt` list of both."""
    if path.endswith(".txt") and not is_url(path):
        try:
            lines = lines_of(Path(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot read this list of shards ({error})") from error
        return [name for line in lines for name in _shard_paths(line.strip())]
    if not is_url(path) and Path(path).is_dir():
        names = sorted(file.name for file in Path(path).glob("*.tar"))
        require_single_split(path, names)
        return [f"{Path(path) / name}" for name in names]
    try:
        names = list(braceexpand(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    for url in {file_of(name)[0] for name in names if is_url(name)}:
        RemoteFolder(url)  # raises now if no file system reads the URL
    for name in names:
        if not (file_of(name)[1] if is_url(name) else name).endswith(".tar"):
            raise ConfigError(f"{name}: name tars, as in cc/{{00000..00331}}.tar, or a folder")
        if not is_url(name) and not Path(name).is_file():
            raise ConfigError(f"{name}: there is no such shard")
    return names


def _read_shard(path: str, outages: OutageConfig) -> Iterator[RawSample | BadSample]:
    """Yield the samples of a shard; a BadSample at the end if it is damaged, empty or missing.

    A missing shard behind a URL raises DataError, unless `outages.policy` is "skip".
    """
    where = redact(path)
    try:
        # Download to an unnamed file: no copy stays behind, however this process ends.
        with tempfile.TemporaryFile() if is_url(path) else open(path, "rb") as file:
            if is_url(path):
                folder, name = file_of(path)
                target = f"/proc/self/fd/{file.fileno()}"
                fetch = partial(RemoteFolder(folder, outages).fetch, name, target)
                with_retries(fetch, outages.seconds, where)
            tar = ShardFile(file.fileno(), where)
            samples, problem, _ = tar.list_samples()
            for sample in samples:
                try:
                    yield tar.read(sample)
                except BadSample as bad:
                    yield bad
            if problem or not samples:
                yield BadSample("corrupt shard", f"{where} ({problem or 'it holds nothing'})")
    except (OSError, Unreachable) as error:
        missing = BadSample("missing shard", f"{where} ({error})")
        if is_url(path) and outages.policy != "skip":
            may_pass = isinstance(error, Unreachable)
            raise outage_error(missing, outages.policy, may_pass) from error
        yield missing


class PretrainData(OrderedData):
    """Batches of pretraining: the same for any number of ranks and workers if shards have an index.

    batch: the global batch size. tokenizer: by default the configuration's.
    """

    samples: CaptionedSamples

    def __init__(
        self,
        config: DataConfig,
        inputs: Inputs,
        batch: int,
        seed: int,
        tokenizer: TextProcessor | None = None,
    ) -> None:
        self.config, self.seed = config, seed
        self.tokenizer = tokenizer or TextProcessor.load(config.vocabulary, inputs.max_tokens)
        if self.tokenizer.vocab_size > inputs.vocab_size:
            raise ConfigError(
                f"the vocabulary {config.vocabulary} has {self.tokenizer.vocab_size} tokens, more "
                f"than model.text.vocab_size {inputs.vocab_size}"
            )
        self.preprocessing = Preprocessing(inputs.image_size, *inputs.statistics)
        self.cache = None
        if config.cache is not None:
            self.cache = ShardCache(config.cache.folder, config.cache.limit)
        # An entry per source: in `indices`, or with `epoch_samples` in `shard_lists`. The other
        # list is empty.
        self.indices: list[ShardIndex] = []
        self.shard_lists: list[ShardList] = []
        sampler: TrainingSampler | EndlessSampler
        if config.epoch_samples is not None:
            self.shard_lists = [ShardList(entry.path, config.outages) for entry in config.sources]
            sampler = EndlessSampler(config.epoch_samples, batch)
        else:
            self.indices = [
                ShardIndex.open(entry.path, self.cache, config.outages) for entry in config.sources
            ]
            sampler_class = SlidingSampler if config.shuffle == "sliding" else TrainingSampler
            sampler = sampler_class(
                [_sampler_source(config, *pair) for pair in zip(config.sources, self.indices)],
                config.canonical_streams,
                config.shuffle_window,
                seed,
            )
        self.features = source_features = None
        if config.features is not None:
            self.features = StoredFeatures(config.features)
            augment = None if config.augment.keeps_images else config.augment
            source_features = self.features.require(self.preprocessing, self.indices, augment)
        samples = CaptionedSamples(
            self.indices,
            config.captions == "all",
            self.tokenizer,
            TrainTransform(config.augment, self.preprocessing),
            inputs,
            seed,
            config.texts,
            source_features,
        )
        is_remote = any(index.is_remote for index in self.indices)
        super().__init__(
            sampler,
            samples,
            samples.collate,
            batch,
            config.workers,
            prefetch=partial(_prefetch, self.indices) if is_remote else None,
        )
        hashes = [shards_sha256(index.shards) for index in self.indices]
        hashes += [shard_list.sha256() for shard_list in self.shard_lists]
        self.fingerprint = {f"source {n}": digest for n, digest in enumerate(hashes)}
        self.fingerprint["vocabulary"] = self.tokenizer.sha256()
        if self.features is not None:
            self.fingerprint["features"] = sha256_of(self.features.folder / HEADER_NAME)

    def _loader(
        self, consumed: int, rank: int, world_size: int, stop_after: int | None
    ) -> DataLoader[Any]:
        if self.config.epoch_samples is None:
            self._require_cache_room(consumed, rank, world_size)
            return super()._loader(consumed, rank, world_size, stop_after)
        samples = ResampledSamples(
            self.shard_lists,
            [entry.weight for entry in self.config.sources],
            self.samples,
            self.config.shuffle_window,
            consumed,
            rank,
            world_size,
        )
        return DataLoader(samples, batch_size=self.batch // world_size, **self._settings())

    def _require_cache_room(self, consumed: int, rank: int, world_size: int) -> None:
        """Refuse a cache that is too small for the shards that one rank reads at a time."""
        if self.cache is None:
            return
        assert isinstance(self.sampler, TrainingSampler)
        needed = 0
        shards = concurrent_shards(self.sampler, self.batch, consumed, rank, world_size)
        for source, shard in shards:
            index = self.indices[source]
            needed += int(index.shards.bytes[shard]) if index.is_remote else 0
        if needed > self.cache.limit:
            raise ConfigError(
                f"data.cache.limit {self.cache.limit:,} bytes is too small: one rank alone reads "
                f"from {needed:,} bytes of shards at a time; "
                "raise it, or lower data.shuffle_window or data.canonical_streams"
            )


def _sampler_source(config: DataConfig, entry: SourceConfig, index: ShardIndex) -> Source:
    if not len(index):
        raise ConfigError(f"{entry.path}: its shards hold no samples")
    if config.captions == "one":
        return Source(index.shards.samples, entry.weight)
    index.require_captions()
    return Source(index.shards.pairs, entry.weight)


def _prefetch(indices: Sequence[ShardIndex], source: int, shard: int) -> None:
    indices[source].prefetch(shard)
