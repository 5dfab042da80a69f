"""Features of all images and captions of an evaluation, with a cache of token states."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from evaluation.options import EvalOptions
from evaluation.samples import (
    BlockReader,
    CaptionedSample,
    EvaluationError,
    Samples,
    count_kinds,
    format_kinds,
    single_line_errors,
)
from evaluation.work_sharding import ProcessGroup, evaluation_autocast
from vlp import precision
from vlp.data.schema import normalised_caption
from vlp.data.shards.sample_files import SkippedSample
from vlp.data.text.tokenizer import TextTokens
from vlp.models.cross_encoder import ImageFeatures
from vlp.models.folder import Loaded
from vlp.models.itm_scorer import ITMScorer
from vlp.precision import NotFiniteError, Values

logger = logging.getLogger(__name__)

# Fills rows of positives up to the longest row.
PADDING = -1
GIBIBYTE = 2**30


class Block(NamedTuple):
    """Encoder output `features` of a block, None without usable samples.

    Blocks of images also have the usable samples, a row of the features each, and skipped samples.
    """

    features: Any
    samples: Sequence[SampleInfo] = ()
    skipped: Sequence[SkippedSample] = ()


Key = TypeVar("Key")


class BlockCache(Generic[Key]):
    """LRU cache of encoded blocks, `capacity` bytes in all; the last block is always cached."""

    def __init__(self, encode: Callable[[Key], Block], capacity: int) -> None:
        self._encode = encode
        self._capacity = capacity
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, key: Key) -> Block:
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        block = self._encode(key)
        self._blocks[key] = block
        self._bytes += _size(block)
        while self._bytes > self._capacity and len(self._blocks) > 1:
            _, oldest = self._blocks.popitem(last=False)
            self._bytes -= _size(oldest)
        return block


def _size(block: Block) -> int:
    tensors = [field for field in block.features or () if isinstance(field, Tensor)]
    return sum(tensor.element_size() * tensor.nelement() for tensor in tensors)


class SampleInfo(NamedTuple):
    """Metadata of an encoded image's sample.

    sample_index: index in `Samples`. digest: hash of the bytes of an image without `image_id`.
    """

    image_identity: tuple[str, str]
    key: str
    sample_index: int
    captions: list[str]
    digest: str = ""


class Collection(NamedTuple):
    """I images, each once, and their T captions, in the order of the shards."""

    # Unit features (I, d) and (T, d), float32, on the device.
    image_features: Tensor
    text_features: Tensor
    captions: list[str]
    # (T,): image of each caption.
    image_of_text: NDArray[np.int64]
    # (I, 2) and (T, 2): block and row in the encoder.
    image_location: NDArray[np.int64]
    text_location: NDArray[np.int64]
    skipped: dict[str, int]
    # (I,): first sample of each image.
    samples: list[SampleInfo]
    # Number of captions that the tokenizer truncates.
    num_truncated: int = 0

    def positives(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return images of each text (T, .) and texts of each image (I, .), padded with -1."""
        # Equal captions of several images are positives of all these images.
        texts_of_caption: dict[str, list[int]] = defaultdict(list)
        for text, caption in enumerate(self.captions):
            texts_of_caption[normalised_caption(caption)].append(text)
        images_of_text: list[list[int]] = [[] for _ in self.captions]
        texts_of_image: list[list[int]] = [[] for _ in self.image_features]
        for texts in texts_of_caption.values():
            images = sorted(set(self.image_of_text[texts].tolist()))
            for text in texts:
                images_of_text[text] = images
            for image in images:
                texts_of_image[image] += texts
        return _pad_rows(images_of_text), _pad_rows(map(sorted, texts_of_image))

    @property
    def copies(self) -> int:
        """Return the number of images without `image_id` that repeat an earlier image's bytes."""
        digests = [sample.digest for sample in self.samples if sample.digest]
        return len(digests) - len(set(digests))


def _pad_rows(rows: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    columns = list(zip_longest(*rows, fillvalue=PADDING))
    return np.array(columns, dtype=np.int64).T


class _ImageBlock(NamedTuple):
    """Encoder inputs (rows, ...) and metadata of a block's usable samples; its skipped samples.

    inputs: None without usable samples.
    """

    inputs: Tensor | None
    samples: list[SampleInfo]
    skipped: list[SkippedSample]


def _read_images(
    samples: Samples, preprocess: Callable[[Any], Tensor], batch: int, block: int
) -> _ImageBlock:
    """Read and prepare the images of a block, in any process."""
    inputs, usable, skipped = [], [], []
    for index in range(len(samples))[_rows(block, batch)]:
        sample = samples.read(index)
        if isinstance(sample, CaptionedSample):
            image: Any = sample.image
            inputs.append(image if isinstance(image, Tensor) else preprocess(image))
            usable.append(
                SampleInfo(sample.image_identity, sample.key, index, sample.captions, sample.digest)
            )
        else:
            skipped.append(sample)
    return _ImageBlock(torch.stack(inputs) if inputs else None, usable, skipped)


class Encoder:
    """Encoder of fixed blocks of `batch` samples or captions, on one device, with caches.

    `image_blocks` and `text_blocks` are caches, and `text_lengths` (blocks,) the numbers of tokens
    to which blocks of captions are padded. memory: bytes of each cache.
    """

    def __init__(
        self,
        loaded: Loaded,
        samples: Samples,
        options: EvalOptions,
        device: torch.device,
        memory: int = 0,
    ) -> None:
        self.loaded = loaded
        self.itm_scorer = ITMScorer(loaded.model)
        self.samples = samples
        self.batch = options.batch
        self.device = device
        self.precision = options.precision
        self._progress = options.progress
        self.image_blocks = BlockCache(self._encode_images, memory)
        self._reader = BlockReader(
            partial(_read_images, samples, loaded.preprocess, options.batch),
            device,
            options.workers,
        )
        self.text_blocks: BlockCache[int] = BlockCache(self._encode_texts, memory)
        # `collect` sets both.
        self._tokens = TextTokens(*(torch.empty(0) for _ in TextTokens._fields))
        self.text_lengths = np.zeros(0, dtype=np.int64)

    def collect(self, processes: ProcessGroup, label: str = "encode") -> Collection:
        """Encode all images and captions, with a progress bar; merge samples of one image."""

        def encode(block: int) -> Block:
            encoded = self.image_blocks[block]
            bar.update(len(range(len(self.samples))[_rows(block, self.batch)]))
            return encoded._replace(features=_unit_features(encoded.features))

        # About the number of this rank's samples: ranks share blocks, not samples.
        total, count = len(processes.share(len(self.samples))), len(self._image_block_range)
        quiet = not (self._progress and processes.first)
        with (
            tqdm(total=total, desc=label, disable=quiet) as bar,
            self._reader.prefetch(processes.share(count)),
        ):
            image_blocks = processes.map_blocks(count, encode)
        skipped = count_kinds([skip for encoded in image_blocks for skip in encoded.skipped])
        index_of: dict[tuple[str, str], int] = {}
        locations: list[tuple[int, int]] = []
        samples: list[SampleInfo] = []
        captions: list[list[str]] = []
        for block, encoded in enumerate(image_blocks):
            for row, sample in enumerate(encoded.samples):
                # The image keeps its first sample, and gets the captions of all its samples.
                if sample.image_identity not in index_of:
                    index_of[sample.image_identity] = len(index_of)
                    locations.append((block, row))
                    samples.append(sample)
                    captions.append([])
                captions[index_of[sample.image_identity]].extend(sample.captions)
        if not locations:
            raise EvaluationError(
                f"{', '.join(self.samples.folders)}: no usable sample in "
                f"{len(self.samples)} ({format_kinds(skipped)})"
            )
        image_features = np.stack([image_blocks[block].features[row] for block, row in locations])
        texts = [caption for group in captions for caption in group]
        text_features, text_location = self._encode_captions(texts, processes)
        return Collection(
            image_features=torch.from_numpy(image_features).to(self.device),
            text_features=torch.from_numpy(text_features).to(self.device),
            captions=texts,
            image_of_text=np.repeat(np.arange(len(locations)), [len(group) for group in captions]),
            image_location=np.array(locations, dtype=np.int64),
            text_location=text_location,
            skipped=skipped,
            samples=samples,
            num_truncated=count_truncated(self.loaded.text, texts),
        )

    def _encode_captions(
        self, texts: list[str], processes: ProcessGroup
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return unit features (T, d), and the block and row of each caption (T, 2).

        Both are in the order of `texts`. Sets `_tokens` and `text_lengths`.
        """
        tokens = self.loaded.text(texts)
        # Captions of similar length share a block and are padded to its longest: less padding here
        # and in the cross-modal encoder.
        order = tokens.attention_mask.sum(dim=1).argsort(stable=True)
        self._tokens = TextTokens(*(part[order] for part in tokens))
        self.text_lengths = self._block_lengths(self._tokens.attention_mask)
        num_blocks = -(-len(texts) // self.batch)
        features = np.concatenate(
            processes.map_blocks(
                num_blocks, lambda block: _unit_features(self.text_blocks[block].features)
            )
        )
        # Index of each caption among the captions sorted by length.
        sorted_index = order.argsort().numpy()
        location = np.stack([sorted_index // self.batch, sorted_index % self.batch], axis=1)
        return features[sorted_index], location

    def prefetch_images(self) -> AbstractContextManager[None]:
        """Prefetch images within the context, for blocks that were evicted from the cache."""
        return self._reader.prefetch(self._image_block_range)

    @property
    def _image_block_range(self) -> range:
        return range(-(-len(self.samples) // self.batch))

    def _block_lengths(self, mask: Tensor) -> NDArray[np.int64]:
        """Return the numbers of tokens (blocks,) to which blocks of captions are padded.

        mask: (T, N), True for tokens, of the captions sorted by length.
        """
        lengths = mask.sum(dim=1).numpy()
        if self.itm_scorer.reads_padding:
            lengths = np.full_like(lengths, mask.shape[1])
        # A block's last caption is its longest.
        last_rows = np.arange(0, len(lengths), self.batch) + self.batch - 1
        return lengths[last_rows.clip(max=len(lengths) - 1)]

    def _encode_images(self, block: int) -> Block:
        inputs, usable, skipped = self._reader[block]
        if inputs is None:
            return Block(None, usable, skipped)
        inputs = inputs.to(self.device, non_blocking=True)
        with torch.no_grad(), evaluation_autocast(self.device, self.precision):
            return Block(self.loaded.model.encode_image(inputs), usable, skipped)

    def _encode_texts(self, block: int) -> Block:
        tokens = TextTokens(*(part[_rows(block, self.batch)] for part in self._tokens))
        inputs = (part[:, : self.text_lengths[block]].to(self.device) for part in tokens)
        with torch.no_grad(), evaluation_autocast(self.device, self.precision):
            return Block(self.loaded.model.encode_text(*inputs))


def _rows(block: int, batch: int) -> slice:
    return slice(block * batch, (block + 1) * batch)


def _unit_features(features: Any) -> NDArray[np.float32]:
    """Return the unit features (rows, d) of a block's encoder output."""
    if features is None:
        return np.zeros((0, 0), dtype=np.float32)
    return require_finite(features.feature.float().cpu().numpy())


def count_truncated(tokenize: Callable[[Sequence[str]], TextTokens], texts: Sequence[str]) -> int:
    """Return the number of texts that `tokenize`, such as `Loaded.text`, truncates.

    0 if `tokenize` has no method `count_truncated`.
    """
    counter = getattr(tokenize, "count_truncated", None)
    return counter(texts) if counter else 0


def warn_if_truncated(tokenize: Callable[[Sequence[str]], TextTokens], text: str) -> None:
    """Log a warning if `tokenize` truncates a text."""
    if count_truncated(tokenize, [text]):
        logger.warning("the text is longer than max_tokens: the model reads its beginning")


def require_finite(values: Values) -> Values:
    """Return features or scores; raise EvaluationError if any is NaN or infinite."""
    with single_line_errors(NotFiniteError):
        return precision.require_finite(values)


@torch.no_grad()
def encode_image(loaded: Loaded, image: Image.Image, device: torch.device) -> ImageFeatures:
    """Encode an image of any size, as a batch of one, on `device`.

    Features have no gradients but may enter a differentiated computation, such as Grad-CAM.
    """
    return loaded.model.encode_image(loaded.preprocess(image)[None].to(device))
