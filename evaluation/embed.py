"""Features of all images and captions of some shards, for indices and other programs."""

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

from evaluation.encoder import count_cut, require_finite
from evaluation.options import EvalOptions
from evaluation.samples import BlockReader, EvaluationError, count_kinds
from evaluation.work_sharding import ProcessGroup, evaluating, inference
from vlp.config import Precision
from vlp.data.image.decode import decode_image
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import BadSample, SkippedSample
from vlp.data.shards.shard_reader import Items
from vlp.io import parse_json
from vlp.models.folder import Loaded


class FeatureFiles:
    """Writes NAME.npy (rows, width) and NAME.jsonl for some names."""

    def __init__(
        self, out: Path, names: Sequence[str], width: int, dtype: str, processes: ProcessGroup
    ) -> None:
        self._out, self._names, self._width, self._dtype = out, names, width, np.dtype(dtype)
        self._processes = processes
        self._parts = out.with_name(out.name + ".tmp")
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise EvaluationError(f"--out {out}: is there already; name another folder")
        # The first rank alone; its errors reach the others.
        self._processes.map_blocks(1, lambda _: self._start())
        self._rows = dict.fromkeys(names, 0)

    def add(self, name: str, features: NDArray[Any], rows: Sequence[Mapping[str, Any]]) -> int:
        """Append (rows, width) features and their lines; gives this rank's row of the first."""
        first = self._rows[name]
        data, lines = self._files(name, self._processes.rank)
        with data.open("ab") as file:
            file.write(np.ascontiguousarray(features, dtype=self._dtype).tobytes())
        with lines.open("a", encoding="utf-8") as text:
            text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._rows[name] += len(features)
        return first

    def finish(self, refers: Mapping[str, str] | None = None) -> dict[str, int]:
        """Merge the ranks' files under their final names, and return the rows of each.

        refers: name -> name of the file that its row numbers point into.
        """
        processes = self._processes
        rows_of_ranks = processes.map_blocks(processes.world_size, lambda _: self._rows)
        processes.map_blocks(1, lambda _: self._join(rows_of_ranks, refers or {}))
        return {name: sum(rows[name] for rows in rows_of_ranks) for name in self._names}

    def _files(self, name: str, rank: int) -> tuple[Path, Path]:
        return self._parts / f"{name}.{rank}.raw", self._parts / f"{name}.{rank}.lines"

    def _start(self) -> None:
        try:
            # Parts of a run that was interrupted.
            if self._parts.is_dir():
                shutil.rmtree(self._parts)
            self._parts.mkdir(parents=True)
        except OSError as error:
            raise EvaluationError(
                f"--out {self._out}: cannot be written ({error.strerror})"
            ) from error

    def _join(self, rows_of_ranks: Sequence[dict[str, int]], refers: Mapping[str, str]) -> None:
        for name in self._names:
            shape = sum(rows[name] for rows in rows_of_ranks), self._width
            with (
                (self._parts / f"{name}.npy").open("wb") as data,
                (self._parts / f"{name}.jsonl").open("w", encoding="utf-8") as lines,
            ):
                header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(data, header)
                # Ranks count rows from 0 each, so that references are moved by the rows before.
                offset = 0
                for rank, rows in enumerate(rows_of_ranks):
                    parts = self._files(name, rank)
                    if parts[0].is_file():
                        with parts[0].open("rb") as part:
                            shutil.copyfileobj(part, data, 2**20)
                        with parts[1].open(encoding="utf-8") as part_lines:
                            for line in part_lines:
                                lines.write(_shift_reference(line, refers.get(name), offset))
                    parts[0].unlink(missing_ok=True)
                    parts[1].unlink(missing_ok=True)
                    offset += rows[refers[name]] if name in refers else 0
        # An empty folder may be there; the rename makes all files appear at once.
        if self._out.is_dir():
            self._out.rmdir()
        self._parts.rename(self._out)


def _shift_reference(line: str, reference: str | None, offset: int) -> str:
    if reference is None:
        return line
    row = parse_json(line)
    row[reference] += offset
    return json.dumps(row, ensure_ascii=False) + "\n"


IMAGES, CAPTIONS = "images", "captions"
Dtype = Literal["float32", "float16"]


class _ReadPairs(NamedTuple):
    """A block of samples: valid images, their lines, and captions (image row, number, text)."""

    pixels: torch.Tensor | None
    rows: list[dict[str, Any]]
    captions: list[tuple[int, int, str]]
    skipped: list[SkippedSample]


def _read(
    items: Items, blocks: Sequence[range], preprocess: Callable[[Any], torch.Tensor], number: int
) -> _ReadPairs:
    """Read and prepare a block, in any process."""
    rows: list[dict[str, Any]] = []
    pixels, captions, skipped = [], [], []
    for item in blocks[number]:
        try:
            raw = items.read(item).raw
            pixels.append(preprocess(decode_image(raw.image, raw.where)))
        except BadSample as bad:
            skipped.append(SkippedSample(bad.kind, bad.where))
            continue
        annotation = raw.annotation
        rows.append({"key": raw.key, "source": annotation.source, "image_id": annotation.image_id})
        captions += [(len(rows) - 1, *caption) for caption in enumerate(captions_of(annotation))]
    return _ReadPairs(torch.stack(pixels) if pixels else None, rows, captions, skipped)


class Embedded(NamedTuple):
    """Rows of each file, bad samples by kind, and captions longer than the model reads."""

    images: int
    captions: int
    skipped: dict[str, int]
    cut: int = 0


def embed(
    loaded: Loaded,
    shards: Sequence[str | Path],
    out: str | Path,
    options: EvalOptions = EvalOptions(),
    *,
    dtype: Dtype = "float32",
) -> Embedded:
    """Write `images.npy`, `captions.npy` (rows, d) of unit length, and a line of JSON a row.

    Rows follow the order of the shards for any number of ranks, a row a sample (captioned or not)
    and a row a caption. `images.jsonl` has {key, source, image_id}; `captions.jsonl` {key, caption:
    its number in the sample, text, images: row of its image}.
    """
    processes, items = ProcessGroup.current(), Items(shards, limit=options.limit)
    width = loaded.model.config.embed_dim
    files = FeatureFiles(Path(out), (IMAGES, CAPTIONS), width, dtype, processes)
    batch = options.batch
    blocks = [range(start, min(start + batch, len(items))) for start in range(0, len(items), batch)]

    def write(number: int) -> tuple[list[SkippedSample], int]:
        pixels, rows, captions, skipped = reader[number]
        if pixels is not None:
            first = files.add(
                IMAGES, _images(loaded, pixels, torch_device, options.precision), rows
            )
            for start in range(0, len(captions), batch):
                part = captions[start : start + batch]
                lines = [
                    {"key": rows[row]["key"], "caption": count, "text": text, IMAGES: first + row}
                    for row, count, text in part
                ]
                texts = [text for _, _, text in part]
                files.add(CAPTIONS, _texts(loaded, texts, torch_device, options.precision), lines)
        bar.update(len(blocks[number]))
        return skipped, count_cut(loaded.text, [text for *_, text in captions])

    share = processes.share(len(blocks))
    total = sum(len(blocks[number]) for number in share)
    quiet = not (options.progress and processes.first)
    with (
        evaluating(loaded.model, options.device) as torch_device,
        tqdm(total=total, desc="embed", disable=quiet) as bar,
    ):
        reader = BlockReader(
            partial(_read, items, blocks, loaded.preprocess), torch_device, options.workers
        )
        with reader.ahead(share):
            parts = processes.map_blocks(len(blocks), write)
    skipped = [skip for part, _ in parts for skip in part]
    if len(skipped) == len(items):
        raise EvaluationError(
            f"{', '.join(items.folders)}: no image could be used; the first: {skipped[0].kind}, "
            f"{skipped[0].where}"
        )
    rows = files.finish({CAPTIONS: IMAGES})
    cut = sum(cut for _, cut in parts)
    return Embedded(rows[IMAGES], rows[CAPTIONS], count_kinds(skipped), cut)


def _images(
    loaded: Loaded, pixels: torch.Tensor, device: torch.device, precision: Precision | None
) -> NDArray[np.float32]:
    with torch.no_grad(), inference(device, precision):
        feature = loaded.model.encode_image(pixels.to(device, non_blocking=True)).feature
    return require_finite(feature.float().cpu().numpy())


def _texts(
    loaded: Loaded, texts: list[str], device: torch.device, precision: Precision | None
) -> NDArray[np.float32]:
    tokens = (part.to(device) for part in loaded.text(texts))
    with torch.no_grad(), inference(device, precision):
        feature = loaded.model.encode_text(*tokens).feature
    return require_finite(feature.float().cpu().numpy())
