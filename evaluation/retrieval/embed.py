"""Features of all images and captions of some shards, for indices and other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evaluation.core.block_reader import BlockReader
from evaluation.core.eval_mode import evaluating, inference
from evaluation.core.feature_files import FeatureFiles
from evaluation.core.samples import EvaluationError, count_kinds
from evaluation.core.work_sharding import Ranks
from evaluation.probes.anchor_maps import read_pair
from vlp.config import Precision
from vlp.data.downstream.items import Items
from vlp.data.image.decode import decode_image
from vlp.data.schema import captions_of
from vlp.data.shards.bad_samples import SkippedSample
from vlp.data.shards.sample_files import BadSample
from vlp.models.folder import Loaded

IMAGES, CAPTIONS = "images", "captions"
Dtype = Literal["float32", "float16"]


class _ReadPairs(NamedTuple):
    """A block of samples: images of the good ones, their lines, and their captions.

    A caption is the row of its image, its number there and its text.
    """

    pixels: torch.Tensor | None
    rows: list[dict[str, Any]]
    captions: list[tuple[int, int, str]]
    skipped: list[SkippedSample]


def _read(
    items: Items,
    blocks: Sequence[range],
    preprocess: Callable[[Any], torch.Tensor],
    number: int,
) -> _ReadPairs:
    """Read and prepare a block, in any process."""
    rows: list[dict[str, Any]] = []
    pixels, captions, skipped = [], [], []
    for item in blocks[number]:
        try:
            raw, _, where = items.read(item)
            pixels.append(preprocess(decode_image(raw.image, where)))
        except BadSample as bad:
            skipped.append(SkippedSample(bad.kind, bad.where))
            continue
        said = raw.annotation
        rows.append({"key": raw.key, "source": said.source, "image_id": said.image_id})
        captions += [(len(rows) - 1, *one) for one in enumerate(captions_of(said))]
    return _ReadPairs(torch.stack(pixels) if pixels else None, rows, captions, skipped)


class Embedded(NamedTuple):
    """Rows of each file, and bad samples by kind."""

    images: int
    captions: int
    skipped: dict[str, int]


def embed(
    loaded: Loaded,
    shards: Sequence[str | Path],
    out: str | Path,
    *,
    dtype: Dtype = "float32",
    limit: int | None = None,
    batch: int = 64,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Embedded:
    """Write `images.npy`, `captions.npy` (rows, d) of unit length, and a line of JSON a row.

    Rows come in the order of the shards, a row a sample and a row a caption, whatever the number of
    ranks. `images.jsonl` has {key, source, image_id}; `captions.jsonl` {key, caption: its number
    in the sample, text, images: row of its image}. No more than a block is held in memory.

    Args:
        loaded: model, text and image preparation.
        shards: shard folders, read as one set; samples without captions have an image all the
            same.
        out: folder to be made.
        dtype: of the rows.
        limit: only the first so many samples.
        batch: images or captions of one encoder call.
        device: where to compute; None is this rank's GPU, or the CPU.
        precision: of the encoders; None: bf16 on a GPU, float32 elsewhere.
        workers: processes that read; None: this rank's cores up to 8 on a GPU, none on a CPU.
        progress: a bar on the first rank.

    Raises:
        EvaluationError: `out` is there already, or no image can be used.
        ConfigError: a shard folder cannot be read.
    """
    ranks, items = Ranks.current(), Items(shards, limit=limit)
    width = loaded.model.config.embed_dim
    files = FeatureFiles(Path(out), (IMAGES, CAPTIONS), width, dtype, ranks)
    blocks = [range(start, min(start + batch, len(items))) for start in range(0, len(items), batch)]

    def write(number: int) -> list[SkippedSample]:
        pixels, rows, captions, skipped = reader[number]
        if pixels is not None:
            first = files.add(IMAGES, _images(loaded, pixels, torch_device, precision), rows)
            for start in range(0, len(captions), batch):
                part = captions[start : start + batch]
                lines = [
                    {
                        "key": rows[row]["key"],
                        "caption": count,
                        "text": text,
                        IMAGES: first + row,
                    }
                    for row, count, text in part
                ]
                texts = [text for _, _, text in part]
                files.add(CAPTIONS, _texts(loaded, texts, torch_device, precision), lines)
        bar.update(len(blocks[number]))
        return skipped

    share = ranks.share(len(blocks))
    own = sum(len(blocks[number]) for number in share)
    quiet = not (progress and ranks.first)
    with (
        evaluating(loaded.model, device) as torch_device,
        tqdm(total=own, desc="embed", disable=quiet) as bar,
    ):
        reader = BlockReader(
            partial(_read, items, blocks, loaded.preprocess), torch_device, workers
        )
        with reader.ahead(share):
            skipped = [skip for part in ranks.map_blocks(len(blocks), write) for skip in part]
    if len(skipped) == len(items):
        raise EvaluationError(
            f"{', '.join(items.folders)}: no image could be used; the first: {skipped[0].kind}, "
            f"{skipped[0].where}"
        )
    rows = files.finish({CAPTIONS: IMAGES})
    return Embedded(rows[IMAGES], rows[CAPTIONS], count_kinds(skipped))


def embed_inputs(
    loaded: Loaded,
    images: Sequence[str | Path],
    texts: Sequence[str],
    device: torch.device | str | None = None,
    precision: Precision | None = None,
) -> list[tuple[dict[str, Any], NDArray[np.float32]]]:
    """Return a description ({image} or {text}) and the (d,) feature of each image file and text.

    Raises:
        EvaluationError: an image cannot be read, or there is nothing to embed.
    """
    if not images and not texts:
        raise EvaluationError("there is nothing to embed: give --image or --text")
    pixels = [loaded.preprocess(read_pair(path, "").image) for path in images]
    found: list[tuple[dict[str, Any], NDArray[np.float32]]] = []
    with evaluating(loaded.model, device) as torch_device:
        if pixels:
            rows = _images(loaded, torch.stack(pixels), torch_device, precision)
            found += [({"image": str(path)}, row) for path, row in zip(images, rows)]
        if texts:
            rows = _texts(loaded, list(texts), torch_device, precision)
            found += [({"text": text}, row) for text, row in zip(texts, rows)]
    return found


def write_inputs(
    found: Sequence[tuple[dict[str, Any], NDArray[np.float32]]], folder: Path, dtype: Dtype
) -> None:
    """Write the features of `embed_inputs` as the files that `embed` writes of shards."""
    names = {"image": IMAGES, "text": CAPTIONS}
    kinds = [kind for kind in names if any(kind in what for what, _ in found)]
    files = FeatureFiles(
        folder, [names[kind] for kind in kinds], found[0][1].size, dtype, Ranks(0, 1)
    )
    for kind in kinds:
        own = [(what, feature) for what, feature in found if kind in what]
        rows = np.stack([feature for _, feature in own])
        files.add(names[kind], rows, [what for what, _ in own])
    files.finish()


def _images(
    loaded: Loaded,
    pixels: torch.Tensor,
    device: torch.device,
    precision: Precision | None,
) -> NDArray[np.float32]:
    with torch.no_grad(), inference(device, precision):
        feature = loaded.model.encode_image(pixels.to(device, non_blocking=True)).feature
    found: NDArray[np.float32] = feature.float().cpu().numpy()
    return found


def _texts(
    loaded: Loaded, texts: list[str], device: torch.device, precision: Precision | None
) -> NDArray[np.float32]:
    tokens = (part.to(device) for part in loaded.text(texts))
    with torch.no_grad(), inference(device, precision):
        feature = loaded.model.encode_text(*tokens).feature
    found: NDArray[np.float32] = feature.float().cpu().numpy()
    return found
