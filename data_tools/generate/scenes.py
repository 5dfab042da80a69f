"""`python -m data_tools scenes`: write the generated corpus as shards.

OUT/train and OUT/val hold captioned scenes; the other parts are written when their number is given.
The same arguments give the same bytes, with any number of processes and after any interruption.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data_tools.executor.executor import Executor, go_on
from data_tools.executor.options import add_executor, executor_of
from vlp.config import ConfigError
from vlp.data.scenes.annotation import (
    annotation,
    box_statement_annotation,
    snli_ve_annotation,
    statement_annotation,
    swap_annotation,
)
from vlp.data.scenes.distinct import ambiguous_share, distinct_scenes
from vlp.data.scenes.graph import Scene
from vlp.data.scenes.negatives import SWAP_KINDS, SwapKind, sample_swap, swap_kinds
from vlp.data.scenes.nlvr2 import sample_statement
from vlp.data.scenes.nlvr_v1.box_statements import sample_box_statement
from vlp.data.scenes.nlvr_v1.boxes import render_boxes
from vlp.data.scenes.render import encode_png, render
from vlp.data.scenes.sample import FULL, LEAST, Variety, sample_scene
from vlp.data.scenes.snli_ve import sample_triple
from vlp.data.scenes.splits import Split
from vlp.data.schema import Annotation
from vlp.data.shards.shard_index import ShardWriter
from vlp.io import parse_json, write_text
from vlp.lock import FolderLock

SETTINGS_NAME = "scenes.json"
CORPUS_VERSION = 7
"""Raised whenever equal arguments give other samples than before."""

PARTS = {
    "train": (20_000, "captioned scenes to train on"),
    "val": (256, "captioned scenes of held-out contents that no other one's caption fits"),
    "unseen": (0, "captioned scenes with relations between shapes that training never shows"),
    "swaps": (0, "hard negatives: two images, two captions, of held-out families"),
    "twins": (0, "scenes to train on, each followed by the one its caption's swap is true of"),
    "nlvr2": (0, "true or false statements about two images"),
    "snli_ve": (0, "hypotheses about an image with a curtain"),
    "nlvr2_val": (0, "statements about images of held-out contents"),
    "snli_ve_val": (0, "hypotheses about images of held-out contents"),
    "boxes": (0, "true or false statements about three boxes, in the manner of NLVR v1"),
    "boxes_val": (0, "more such statements, for validation"),
    "boxes_any": (0, "the same, whose false images need not hold a true one's items: easier"),
}
_SETTINGS = ("seed", "image_size", "samples_per_shard", *Variety._fields)
_CHUNK = 64


class SceneFiles(NamedTuple):
    """Files of one key of a shard."""

    key: str
    image: bytes
    annotation: Annotation
    second_image: bytes | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    for part, (count, what) in PARTS.items():
        parser.add_argument(
            f"--{part.replace('_', '-')}",
            type=int,
            default=count,
            metavar="N",
            help=f"{what} (default {count})",
        )
    parser.add_argument("--image-size", type=int, default=64, help="side in pixels (default 64)")
    for name, least, most in zip(Variety._fields, LEAST, FULL):
        said = f"{least} to {most} (default {most})"
        parser.add_argument(f"--{name}", type=int, default=most, metavar="N", help=said)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=SWAP_KINDS,
        metavar="KIND",
        help=f"of swaps and twins: {', '.join(SWAP_KINDS)} (default: all but distance)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples-per-shard", type=int, default=1000)
    add_executor(parser, "samples that are drawn at the same time")


def run(arguments: argparse.Namespace) -> int:
    """Write the parts that are asked for; samples that are already there stay.

    Raises:
        ConfigError: if a number is out of range, or `--out` holds a corpus of other settings.
    """
    _check(arguments)
    executor = executor_of(arguments)
    start = time.perf_counter()
    written = 0
    with FolderLock(arguments.out):
        _begin(arguments)
        for part in PARTS:
            if getattr(arguments, part):
                written += _write_part(part, arguments, executor)
    seconds = time.perf_counter() - start
    speed = f" in {seconds:.1f} s ({written / seconds:.0f} a second)" if written else ""
    print(f"{arguments.out}: {written} new samples{speed}")
    return 0


def make_sample(
    part: str,
    seed: int,
    image_size: int,
    job: int | Scene,
    variety: Variety = FULL,
    kinds: Sequence[SwapKind] | None = None,
) -> SceneFiles:
    """Generate one sample of a part from its index, or from its scene where that is drawn already.

    Swaps and twins are of the `kinds` in turn.

    Raises:
        ValueError: for an unknown part.
    """
    if isinstance(job, Scene):
        return _captioned(job)
    kinds = kinds or swap_kinds(variety)
    if part in ("train", "unseen"):
        split: Split = "unseen" if part == "unseen" else "train"
        return _captioned(sample_scene(seed, job, split, image_size, variety=variety))
    if part == "swaps":
        kind = kinds[job % len(kinds)]
        pair = sample_swap(seed, job, kind, "swaps", image_size, variety)
        return SceneFiles(
            _key(part, seed, job), _png(pair.scene), swap_annotation(pair), _png(pair.twin)
        )
    if part == "twins":
        number, second = divmod(job, 2)
        kind = kinds[number % len(kinds)]
        pair = sample_swap(seed, number, kind, "train", image_size, variety)
        scene, caption = (pair.twin, pair.foil) if second else (pair.scene, pair.caption)
        return SceneFiles(_key(part, seed, job), _png(scene), annotation(scene, [caption]))
    held_out: Split = "val" if part.endswith("_val") else "train"
    if part in ("nlvr2", "nlvr2_val"):
        told = sample_statement(seed, job, held_out, image_size)
        return SceneFiles(
            _key(part, seed, job), _png(told.left), statement_annotation(told), _png(told.right)
        )
    if part in ("snli_ve", "snli_ve_val"):
        triple = sample_triple(seed, job, held_out, image_size)
        return SceneFiles(_key(part, seed, job), _png(triple.scene), snli_ve_annotation(triple))
    if part in ("boxes", "boxes_val", "boxes_any"):
        shown = sample_box_statement(seed, job, held_out, same_items=part != "boxes_any")
        image = encode_png(render_boxes(shown.scene))
        return SceneFiles(_key(part, seed, job), image, box_statement_annotation(shown))
    raise ValueError(f"unknown part {part!r}, known are {', '.join(PARTS)}")


def _write_part(part: str, arguments: argparse.Namespace, executor: Executor) -> int:
    count, seed, image_size = getattr(arguments, part), arguments.seed, arguments.image_size
    variety = Variety(*(getattr(arguments, name) for name in Variety._fields))
    jobs: list[int | Scene] = list(range(count))
    scenes: list[Scene] = []
    keys = [_key(part, seed, index) for index in range(count)]
    if part == "val":
        # Which scenes are told apart from all others is decided one after the other.
        scenes = list(distinct_scenes(seed, count, "val", image_size, variety))
        jobs = list(scenes)
    with ShardWriter(arguments.out / part, arguments.samples_per_shard) as writer:
        missing = [job for key, job in zip(keys, jobs, strict=True) if key not in writer.done]
        make = partial(make_sample, part, seed, image_size, variety=variety, kinds=arguments.kinds)
        bar = tqdm(total=count, initial=count - len(missing), desc=part, unit=" samples")
        with bar:
            for sample in _mapped(make, missing, executor):
                writer.write(
                    sample.key, sample.image, "png", sample.annotation, sample.second_image
                )
                bar.update()
    if scenes:
        print(
            f"{part}: {ambiguous_share(scenes):.1%} of the captions fit a second image; "
            f"a box covers {mean_box_share(scenes):.1%} of its image on average"
        )
    return len(missing)


def mean_box_share(scenes: Sequence[Scene]) -> float:
    """Mean share of its image that an object's box covers, the chance of a random patch."""
    shares = [
        obj.box[2] * obj.box[3] / scene.image_size**2 for scene in scenes for obj in scene.objects
    ]
    return sum(shares) / max(len(shares), 1)


def _mapped(
    make: Callable[[int | Scene], SceneFiles], jobs: Sequence[int | Scene], executor: Executor
) -> Iterator[SceneFiles]:
    """Yield samples in the order of their jobs; few are not worth starting processes."""
    if len(jobs) < 8 * _CHUNK:
        return map(make, jobs)
    chunks = (jobs[start : start + _CHUNK] for start in range(0, len(jobs), _CHUNK))
    return chain.from_iterable(executor.map(partial(_chunk, make), chunks))


def _chunk(
    make: Callable[[int | Scene], SceneFiles], jobs: Sequence[int | Scene]
) -> list[SceneFiles]:
    go_on()
    return [make(job) for job in jobs]


def _check(arguments: argparse.Namespace) -> None:
    """Refuse settings that make no sense."""
    least = {**dict.fromkeys(PARTS, 0), "image_size": 16, "samples_per_shard": 1}
    for name, smallest in least.items():
        if getattr(arguments, name) < smallest:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {getattr(arguments, name)}, at least {smallest}")
    for name, fewest, most in zip(Variety._fields, LEAST, FULL):
        given = getattr(arguments, name)
        if not fewest <= given <= most:
            raise ConfigError(f"--{name} is {given}, {fewest} to {most} are possible")
    if arguments.kinds and arguments.objects < 2 and {*arguments.kinds} != {"place"}:
        raise ConfigError(f"--kinds {' '.join(arguments.kinds)} want --objects 2 at least")


def _begin(arguments: argparse.Namespace) -> None:
    """Refuse a folder that holds a corpus of other settings, or shards of another command."""
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    if arguments.kinds:
        settings["kinds"] = arguments.kinds
    settings["version"] = CORPUS_VERSION
    path = arguments.out / SETTINGS_NAME
    if path.exists():
        found = parse_json(path.read_text())
        if found != settings:
            raise ConfigError(
                f"{path} says {found}, this command {settings}: choose another --out, or delete "
                f"{arguments.out}"
            )
    else:
        for part in PARTS:
            for other in (arguments.out / part).glob("*.tar"):
                raise ConfigError(
                    f"{other}: a shard that `scenes` did not write; choose another --out"
                )
        write_text(path, json.dumps(settings) + "\n", error=ConfigError)


def _captioned(scene: Scene) -> SceneFiles:
    return SceneFiles(scene.key, _png(scene), annotation(scene))


def _png(scene: Scene) -> bytes:
    return encode_png(render(scene))


def _key(part: str, seed: int, index: int) -> str:
    return f"{part}-{seed}-{index}"
