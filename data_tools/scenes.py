"""`vlp data scenes`: the generated corpus as shards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple, cast

from tqdm import tqdm
from typer import Option

from data_tools.executor import Executor, raise_if_stopped
from data_tools.options import N, Out, WorkerOptions
from vlp.command_line import nearest
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.io import parse_json, write_text
from vlp.lock import FolderLock
from vlp.scenes.annotation import (
    annotation,
    snli_ve_annotation,
    statement_annotation,
    swap_annotation,
)
from vlp.scenes.graph import Scene
from vlp.scenes.negatives import SWAP_KINDS, SwapKind, sample_swap, swap_kinds
from vlp.scenes.nlvr2 import sample_statement
from vlp.scenes.nlvr_v1 import render_boxes, sample_box_statement
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import (
    MAX_VARIETY,
    MIN_VARIETY,
    Split,
    Variety,
    ambiguous_share,
    distinct_scenes,
    sample_scene,
)
from vlp.scenes.snli_ve import sample_triple

SETTINGS_NAME = "scenes.json"
CORPUS_VERSION = 7  # raised whenever equal arguments give other samples

PARTS = (
    *("train", "val", "unseen", "swaps", "twins", "nlvr2", "snli_ve", "nlvr2_val", "snli_ve_val"),
    *("boxes", "boxes_val", "boxes_any"),
)
_SETTINGS = ("seed", "image_size", "samples_per_shard", *Variety._fields)
_CHUNK = 256  # samples of a job


class SceneFiles(NamedTuple):
    """A sample to write; images are PNGs."""

    key: str
    image: bytes
    annotation: Annotation
    second_image: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class SceneOptions:
    """Numbers of samples of each part, and settings of all scenes."""

    train: Annotated[int, N(help="captioned scenes to train on")] = 20_000
    val: Annotated[int, N(help="captioned scenes of held-out contents")] = 256
    unseen: Annotated[int, N(help="scenes with relations of shapes that train never has")] = 0
    swaps: Annotated[int, N(help="hard negatives of held-out families: 2 images, 2 captions")] = 0
    twins: Annotated[int, N(help="as train, with the twin that a swapped caption describes")] = 0
    nlvr2: Annotated[int, N(help="true or false statements about two images")] = 0
    snli_ve: Annotated[int, N(help="hypotheses about an image with a curtain")] = 0
    nlvr2_val: Annotated[int, N(help="statements about images of held-out contents")] = 0
    snli_ve_val: Annotated[int, N(help="hypotheses about images of held-out contents")] = 0
    boxes: Annotated[int, N(help="true or false statements about three boxes (NLVR v1)")] = 0
    boxes_val: Annotated[int, N(help="more such statements, for validation")] = 0
    boxes_any: Annotated[int, N(help="easier: false images may have other items than true")] = 0
    image_size: Annotated[int, N(help="side in pixels")] = 64
    colours: Annotated[int, N(help="maximum in the corpus")] = MAX_VARIETY.colours
    shapes: Annotated[int, N(help="maximum in the corpus")] = MAX_VARIETY.shapes
    objects: Annotated[int, N(help="maximum in a scene")] = MAX_VARIETY.objects
    kinds: Annotated[
        list[str] | None, Option(help="of swaps and twins (default: all but distance)")
    ] = None
    seed: Annotated[int, Option(help="of the corpus")] = 0
    samples_per_shard: Annotated[int, N(help="in one tar")] = 1000

    def __post_init__(self) -> None:
        minimums = {**dict.fromkeys(PARTS, 0), "image_size": 16, "samples_per_shard": 1}
        for name, smallest in minimums.items():
            number = getattr(self, name)
            if number < smallest:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {number}: give at least {smallest}")
        limits = zip(Variety._fields, self.variety, MIN_VARIETY, MAX_VARIETY)
        for name, value, lower, upper in limits:
            if not lower <= value <= upper:
                raise ConfigError(f"--{name} {value}: give {lower} to {upper}")
        unknown = [kind for kind in self.kinds or () if kind not in SWAP_KINDS]
        if unknown:
            raise ConfigError(f"--kinds {unknown[0]}: {nearest(unknown[0], SWAP_KINDS)}")
        if self.kinds and self.variety.objects < 2 and {*self.kinds} != {"place"}:
            raise ConfigError(f"--kinds {' '.join(self.kinds)} need --objects 2 or more")

    @property
    def variety(self) -> Variety:
        """Return the numbers of colours, shapes and objects."""
        return Variety(*(getattr(self, name) for name in Variety._fields))


def scenes(out: Out, options: SceneOptions, workers: WorkerOptions) -> int:
    """Write the generated corpus as shards.

    OUT/train and OUT/val hold captioned scenes, and a caption of val fits no other scene of val.
    Give a number of samples for other parts. The same arguments give the same bytes, with any
    number of processes.
    """
    # Without other processes, each sample is written as soon as it is made.
    executor = None if workers == WorkerOptions(processes=1) else workers.workers()
    start = time.perf_counter()
    with FolderLock(out):
        _check_folder(out, options)
        parts = [part for part in PARTS if getattr(options, part)]
        num_samples = sum(_write_part(part, out, options, executor) for part in parts)
    seconds = time.perf_counter() - start
    speed = f" in {seconds:.1f} s ({num_samples / seconds:.0f} a second)" if num_samples else ""
    print(f"{out}: {num_samples} new samples{speed}")
    return 0


def make_sample(
    part: str,
    seed: int,
    image_size: int,
    index_or_scene: int | Scene,
    variety: Variety = MAX_VARIETY,
    kinds: Sequence[SwapKind] | None = None,
) -> SceneFiles:
    """Generate a sample of a part from its index or scene; swaps and twins alternate `kinds`."""
    if isinstance(index_or_scene, Scene):
        return _captioned_sample(index_or_scene)
    index = index_or_scene
    kinds, key = kinds or swap_kinds(variety), _key(part, seed, index)
    if part in ("train", "unseen"):
        split: Split = "unseen" if part == "unseen" else "train"
        return _captioned_sample(sample_scene(seed, index, split, image_size, variety=variety))
    if part == "swaps":
        kind = kinds[index % len(kinds)]
        pair = sample_swap(seed, index, kind, "swaps", image_size, variety)
        return SceneFiles(key, _png(pair.scene), swap_annotation(pair), _png(pair.twin))
    if part == "twins":
        number, second = divmod(index, 2)
        kind = kinds[number % len(kinds)]
        pair = sample_swap(seed, number, kind, "train", image_size, variety)
        scene, caption = (pair.twin, pair.foil) if second else (pair.scene, pair.caption)
        return SceneFiles(key, _png(scene), annotation(scene, [caption]))
    content_split: Split = "val" if part.endswith("_val") else "train"
    if part in ("nlvr2", "nlvr2_val"):
        statement = sample_statement(seed, index, content_split, image_size)
        return SceneFiles(
            key, _png(statement.left), statement_annotation(statement), _png(statement.right)
        )
    if part in ("snli_ve", "snli_ve_val"):
        triple = sample_triple(seed, index, content_split, image_size)
        return SceneFiles(key, _png(triple.scene), snli_ve_annotation(triple))
    box_statement = sample_box_statement(seed, index, content_split, part != "boxes_any")
    image = encode_png(render_boxes(box_statement.scene))
    return SceneFiles(key, image, statement_annotation(box_statement))


def _write_part(part: str, out: Path, options: SceneOptions, executor: Executor | None) -> int:
    count, seed, image_size = getattr(options, part), options.seed, options.image_size
    variety = options.variety
    kinds = cast("Sequence[SwapKind] | None", options.kinds)  # checked by SceneOptions
    keys = [_key(part, seed, index) for index in range(count)]
    # In this process, as each scene of val is compared with all earlier ones.
    scenes = [*distinct_scenes(seed, count, "val", image_size, variety)] if part == "val" else []
    jobs: Sequence[int | Scene] = scenes or range(count)
    with ShardWriter(out / part, options.samples_per_shard) as writer:
        missing = [job for key, job in zip(keys, jobs, strict=True) if key not in writer.done]
        make = partial(make_sample, part, seed, image_size, variety=variety, kinds=kinds)
        chunks = [missing[start : start + _CHUNK] for start in range(0, len(missing), _CHUNK)]
        samples: Iterator[SceneFiles] = map(make, missing)
        if executor is not None and len(chunks) > 1:
            samples = chain.from_iterable(executor.map(partial(_make_chunk, make), chunks))
        done = count - len(missing)
        for sample in tqdm(samples, total=count, initial=done, desc=part, unit=" samples"):
            writer.write(sample.key, sample.image, "png", sample.annotation, sample.second_image)
    if scenes:
        boxes = [(obj.box, scene.image_size**2) for scene in scenes for obj in scene.objects]
        # The chance that a random patch lies in the box.
        box_share = sum(width * height / area for (_, _, width, height), area in boxes) / len(boxes)
        print(
            f"{part}: {ambiguous_share(scenes):.1%} of the captions fit a second image; "
            f"a box covers {box_share:.1%} of its image on average"
        )
    return len(missing)


def _make_chunk(
    make: Callable[[int | Scene], SceneFiles], jobs: Sequence[int | Scene]
) -> list[SceneFiles]:
    raise_if_stopped()
    return [make(job) for job in jobs]


def _check_folder(out: Path, options: SceneOptions) -> None:
    """Refuse a folder with a corpus of other settings, or with shards of another command."""
    settings = {name: getattr(options, name) for name in _SETTINGS}
    if options.kinds:
        settings["kinds"] = options.kinds
    settings["version"] = CORPUS_VERSION
    path = out / SETTINGS_NAME
    if path.exists():
        stored = parse_json(path.read_text())
        if stored != settings:
            raise ConfigError(
                f"{path} has {stored}, this command {settings}: choose another --out, or delete "
                f"{out}"
            )
    else:
        for part in PARTS:
            for other in (out / part).glob("*.tar"):
                raise ConfigError(
                    f"{other}: a shard that `scenes` did not write; choose another --out"
                )
        write_text(path, json.dumps(settings) + "\n", error=ConfigError)


def _captioned_sample(scene: Scene) -> SceneFiles:
    return SceneFiles(scene.key, _png(scene), annotation(scene))


def _png(scene: Scene) -> bytes:
    return encode_png(render(scene))


def _key(part: str, seed: int, index: int) -> str:
    return f"{part}-{seed}-{index}"
