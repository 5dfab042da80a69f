"""Features of all images and captions of shard folders, for search indices and other programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from evaluation.encoder import count_truncated, require_finite
from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, EvaluationError, count_kinds
from evaluation.work_sharding import ProcessGroup, evaluating, evaluation_autocast, item_blocks
from vlp.data.image.decode import decode_image
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Items
from vlp.io import parse_json
from vlp.models.folder import Loaded


def require_empty(out: Path) -> None:
    """Raise EvaluationError unless `out` is an empty folder, or does not exist."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise EvaluationError(f"--out {out} exists already; name another folder")


IMAGES, CAPTIONS = "images", "captions"
Dtype = Literal["float32", "float16"]


class FeatureFiles:
    """Writer of NAME.npy (rows, width) and NAME.jsonl, a line per row; `finish` merges ranks.

    Names are `IMAGES` and `CAPTIONS`. A caption's line has its image's row in the field `IMAGES`.
    """

    def __init__(self, out: Path, width: int, dtype: str, processes: ProcessGroup) -> None:
        self._out, self._width, self._dtype = out, width, np.dtype(dtype)
        self._processes = processes
        self._parts = out.with_name(out.name + ".tmp")
        require_empty(out)
        # One rank creates the folder; an error is raised on all ranks.
        self._processes.map_blocks(1, lambda _: self._create_folder())
        self._rows = {IMAGES: 0, CAPTIONS: 0}

    def add(self, name: str, features: NDArray[Any], rows: Sequence[Mapping[str, Any]]) -> int:
        """Append features (rows, width) and lines; return the first row's index in this rank."""
        first_row = self._rows[name]
        data, lines = self._files(name, self._processes.rank)
        with data.open("ab") as file:
            file.write(np.ascontiguousarray(features, dtype=self._dtype).tobytes())
        with lines.open("a", encoding="utf-8") as text:
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._rows[name] += len(features)
        return first_row

    def finish(self) -> dict[str, int]:
        """Merge the ranks' files under their final names, and return the number of rows by name."""
        processes = self._processes
        rows_of_ranks = processes.map_blocks(processes.world_size, lambda _: self._rows)
        processes.map_blocks(1, lambda _: self._merge(rows_of_ranks))
        return {name: sum(rows[name] for rows in rows_of_ranks) for name in self._rows}

    def _files(self, name: str, rank: int) -> tuple[Path, Path]:
        return self._parts / f"{name}.{rank}.raw", self._parts / f"{name}.{rank}.lines"

    def _create_folder(self) -> None:
        try:
            # Left by an interrupted run.
            if self._parts.is_dir():
                shutil.rmtree(self._parts)
            self._parts.mkdir(parents=True)
        except OSError as error:
            raise EvaluationError(
                f"--out {self._out}: cannot be written ({error.strerror})"
            ) from error

    def _merge(self, rows_of_ranks: Sequence[dict[str, int]]) -> None:
        for name in self._rows:
            shape = sum(rows[name] for rows in rows_of_ranks), self._width
            with (
                (self._parts / f"{name}.npy").open("wb") as data,
                (self._parts / f"{name}.jsonl").open("w", encoding="utf-8") as lines,
            ):
                header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(data, header)
                # Each rank counts images from 0: add those of the ranks before it.
                offset = 0
                for rank, rows in enumerate(rows_of_ranks):
                    data_part, lines_part = self._files(name, rank)
                    if data_part.is_file():
                        with data_part.open("rb") as part:
                            shutil.copyfileobj(part, data, 2**20)
                        with lines_part.open(encoding="utf-8") as part_lines:
                            shifted = (_shift_image(line, offset) for line in part_lines)
                            lines.writelines(shifted if name == CAPTIONS else part_lines)
                    data_part.unlink(missing_ok=True)
                    lines_part.unlink(missing_ok=True)
                    offset += rows[IMAGES]
        # `out` may be an empty folder; the rename makes all files appear at once.
        if self._out.is_dir():
            self._out.rmdir()
        self._parts.rename(self._out)


def _shift_image(line: str, offset: int) -> str:
    row = parse_json(line)
    row[IMAGES] += offset
    return json.dumps(row, ensure_ascii=False) + "\n"


class _PairBlock(NamedTuple):
    """Usable images of a block, their lines, captions (row in block, index in sample, text)."""

    pixels: torch.Tensor | None
    rows: list[dict[str, Any]]
    captions: list[tuple[int, int, str]]
    skipped: list[SkippedSample]


def _read(
    items: Items, blocks: Sequence[range], preprocess: Callable[[Any], torch.Tensor], block: int
) -> _PairBlock:
    """Read and prepare a block, in any process."""
    rows: list[dict[str, Any]] = []
    pixels, captions, skipped = [], [], []
    for index in blocks[block]:
        try:
            raw = items.read(index).raw
            pixels.append(preprocess(decode_image(raw.image, raw.where)))
        except BadSample as bad:
            skipped.append(SkippedSample(bad.kind, bad.where))
            continue
        annotation = raw.annotation
        rows.append({"key": raw.key, "source": annotation.source, "image_id": annotation.image_id})
        captions += [(len(rows) - 1, *caption) for caption in enumerate(captions_of(annotation))]
    return _PairBlock(torch.stack(pixels) if pixels else None, rows, captions, skipped)


class FeatureCounts(NamedTuple):
    """Rows of each file, skipped samples by kind, and truncated captions."""

    images: int
    captions: int
    skipped: dict[str, int]
    num_truncated: int


def embed(
    loaded: Loaded,
    shards: Sequence[str | Path],
    out: str | Path,
    options: EvalOptions = EvalOptions(),
    *,
    dtype: Dtype = "float32",
) -> FeatureCounts:
    """Write `images.npy` and `captions.npy` (rows, d) of unit length, and JSON lines for both.

    Rows follow the order of the shards for any number of ranks: one per sample (captioned or not),
    and one per caption. Lines of `images.jsonl` are {key, source, image_id}, of `captions.jsonl`
    {key, caption: index in the sample, text, images: row of the image}.
    """
    processes, items = ProcessGroup.current(), Items(shards, limit=options.limit)
    model, batch = loaded.model, options.batch
    files = FeatureFiles(Path(out), model.config.embed_dim, dtype, processes)
    blocks = item_blocks(len(items), batch)

    def encode(encoder: Callable[..., Any], *inputs: torch.Tensor) -> NDArray[np.floating]:
        on_device = (part.to(torch_device, non_blocking=True) for part in inputs)
        with torch.no_grad(), evaluation_autocast(torch_device, options.precision):
            feature = encoder(*on_device).feature
        return require_finite(feature.float().cpu().numpy())

    def write(block: int) -> tuple[list[SkippedSample], int]:
        pixels, rows, captions, skipped = reader[block]
        if pixels is not None:
            first_row = files.add(IMAGES, encode(model.encode_image, pixels), rows)
            for start in range(0, len(captions), batch):
                chunk = captions[start : start + batch]
                lines = [
                    {"key": rows[r]["key"], "caption": i, "text": text, IMAGES: first_row + r}
                    for r, i, text in chunk
                ]
                tokens = loaded.text([text for *_, text in chunk])
                files.add(CAPTIONS, encode(model.encode_text, *tokens), lines)
        bar.update(len(blocks[block]))
        return skipped, count_truncated(loaded.text, [text for *_, text in captions])

    share = processes.share(len(blocks))
    total = sum(len(blocks[block]) for block in share)
    quiet = not (options.progress and processes.first)
    with (
        evaluating(loaded.model, options.device) as torch_device,
        tqdm(total=total, desc="embed", disable=quiet) as bar,
    ):
        reader = BlockReader(
            partial(_read, items, blocks, loaded.preprocess), torch_device, options.workers
        )
        with reader.prefetch(share):
            parts = processes.map_blocks(len(blocks), write)
    skipped = [skip for block_skipped, _ in parts for skip in block_skipped]
    if len(skipped) == len(items):
        raise EvaluationError(
            f"{', '.join(items.folders)}: no image could be used; the first: {skipped[0].kind}, "
            f"{skipped[0].where}"
        )
    rows = files.finish()
    num_truncated = sum(count for _, count in parts)
    return FeatureCounts(rows[IMAGES], rows[CAPTIONS], count_kinds(skipped), num_truncated)
