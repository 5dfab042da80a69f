"""Statements about images, with labels, to shards: NLVR2, NLVR v1 and SNLI-VE."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from PIL import Image
from typer import Option

from data_tools.builder.build import Target, convert_rows, key_of
from data_tools.builder.samples import Fault, SampleSpec
from data_tools.options import BuildOptions, File, Images, N, Out
from data_tools.originals import ImageLocation, Originals
from data_tools.rows import Faults, Row, json_lines, line_count, parse_rows
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample

TRUTH = {"true": True, "false": False}
LABELS = ("entailment", "neutral", "contradiction")

# Box i of permutation k is box PERMUTATIONS[k][i] of permutation 0.
PERMUTATIONS = tuple(itertools.permutations(range(3)))
SIZE = (400, 100)  # width, height of an image of NLVR v1 in pixels
_BOX_LEFTS = (0, 150, 300)
_BOX_SIDE = 100
_NAME = re.compile(r"(.+-)([1-5])(\.png)")  # of a permutation
Lines = Annotated[list[Path], File(help="JSON lines files of one split")]


class _NlvrRow(Row):
    identifier: str
    sentence: str
    label: str | None = None  # missing in hidden test sets
    directory: str | None = None
    left_url: str | None = None  # of NLVR2
    right_url: str | None = None  # of NLVR2
    label_source: str | None = None  # of NLVR v1


class _SnliVeRow(Row):
    Flickr30K_ID: str
    pairID: str
    sentence2: str
    gold_label: str
    sentence1: str | None = None
    captionID: str | None = None


def nlvr2(
    annotations: Lines,
    images: Images,
    out: Out,
    build: BuildOptions,
    extension: Annotated[
        Literal["jpg", "jpeg", "png", "webp"], Option(help="of the images")
    ] = "png",
) -> int:
    """NLVR2 to shards: a statement about two images, true or false.

    --annotations takes the official train.json, dev.json, test1.json... (one object a line, gzipped
    or not). --images takes folders or tars (also compressed) with the images under their official
    names, `<split>-<set>-<pair>-img0.png` (left) and `-img1.png` (right). Each statement is one
    sample with both images, so images of several statements are stored several times.
    """
    faults: Faults = []
    settings = {"annotations": [path.name for path in annotations], "extension": extension}
    licence = "annotations CC BY 4.0; the images' copyright stays with their owners"
    samples = _nlvr2_samples(annotations, extension, faults)
    target = Target(out, build, "NLVR2", licence, settings)
    return convert_rows(target, images, samples, faults, line_count(annotations))


def nlvr_v1(
    annotations: Lines,
    split: Annotated[str, Option(help="first part of the images' names: train, dev ...")],
    images: Images,
    out: Out,
    build: BuildOptions,
    permutations: Annotated[int, N(help="of each example, 1 to 6")] = 1,
) -> int:
    """NLVR v1 to shards: a statement about one image of three boxes, true or false.

    --annotations takes the official {train,dev,test}.json (one object a line, gzipped or not).
    --images takes folders or tars (also compressed) with `<split>-<identifier>-<permutation>.png`.
    The official score counts six permutations of the three boxes (--permutations 6); missing images
    of permutations are made from permutation 0.
    """
    if not 1 <= permutations <= len(PERMUTATIONS):
        raise ConfigError(f"--permutations {permutations}: give 1 to 6")
    title, faults = f"NLVR v1 {split}", Faults()
    samples = (
        _nlvr_v1_sample(example, split, permutation)
        for example in _nlvr_rows(annotations, faults)
        for permutation in range(permutations)
    )
    settings = {
        "annotations": [path.name for path in annotations],
        "split": split,
        "permutations": permutations,
    }
    target = Target(out, build, title, "CC BY 4.0", settings)
    total = line_count(annotations) * permutations
    return convert_rows(target, images, samples, faults, total, _PermutedOriginals)


def snli_ve(annotations: Lines, images: Images, out: Out, build: BuildOptions) -> int:
    """SNLI-VE (and e-SNLI-VE with its field names) to shards: an image, a hypothesis and a label.

    --annotations takes the official snli_ve_{train,dev,test}.jsonl, gzipped or not. --images takes
    folders or tars (also compressed) that hold Flickr30k's images as <Flickr30K_ID>.jpg. Each pair
    is one sample, so images are stored several times; --max-side makes them smaller. Pairs without
    a gold label ("-") are left out and counted.
    """
    faults: Faults = []
    licence = "SNLI: CC BY-SA 4.0; images: Flickr's, for research and education only"
    settings = {"annotations": [path.name for path in annotations]}
    target = Target(out, build, "SNLI-VE", licence, settings)
    samples = _snli_ve_samples(annotations, faults)
    return convert_rows(target, images, samples, faults, line_count(annotations))


class _PermutedLocation(ImageLocation):
    """An image of NLVR v1; reading it permutes its boxes."""

    order: tuple[int, ...] = PERMUTATIONS[0]

    def read(self) -> bytes:
        """Return the image as an RGB PNG; raises BadSample, also for another size than NLVR's."""
        image = decode_image(super().read(), str(self.path))
        if image.size != SIZE:
            size = f"{image.width} x {image.height} pixels, not 400 x 100"
            raise BadSample("unreadable image", f"{self.path} ({size})")
        stream = io.BytesIO()
        permute_boxes(image, self.order).save(stream, "png")
        return stream.getvalue()


class _PermutedOriginals(Originals):
    """Images of NLVR v1; missing permutations are made from permutation 0."""

    def find(self, name: str) -> ImageLocation | None:
        """Find an image, else permutation 0, from which it is made; None if both are missing."""
        location, order = super().find(name), PERMUTATIONS[0]
        parts = _NAME.fullmatch(name)
        if location is None and parts is not None:
            location = super().find(f"{parts[1]}0{parts[3]}")
            order = PERMUTATIONS[int(parts[2])]
        if location is None:
            return None
        permuted = _PermutedLocation(*location)
        permuted.order = order
        return permuted


def permute_boxes(image: Image.Image, order: Sequence[int]) -> Image.Image:
    """Return an image of NLVR v1 with its box `order[i]` at the position of box i."""
    permuted = image.copy()
    for target_left, box in zip(_BOX_LEFTS, order):
        left = _BOX_LEFTS[box]
        permuted.paste(image.crop((left, 0, left + _BOX_SIDE, SIZE[1])), (target_left, 0))
    return permuted


def _nlvr_rows(paths: Sequence[Path], faults: Faults) -> Iterator[_NlvrRow]:
    """Yield the valid rows of NLVR files in order; a repeated identifier is a fault."""
    identifiers: set[str] = set()
    for path in paths:
        for example in parse_rows(json_lines(path, faults), _NlvrRow, faults):
            identifier = example.identifier
            if identifier in identifiers:
                faults.append(Fault("identifier given twice", identifier))
            elif example.label is not None and example.label.lower() not in TRUTH:
                faults.append(Fault("unknown label", f"{identifier} ({example.label})"))
            elif not example.sentence.strip():
                faults.append(Fault("no statement", identifier))
            else:
                yield example
            identifiers.add(identifier)


def _nlvr_fields(example: _NlvrRow) -> Mapping[str, Any]:
    return {
        "statement": example.sentence,
        "label": None if example.label is None else TRUTH[example.label.lower()],
        "identifier": example.identifier,
    }


def _nlvr2_samples(paths: Sequence[Path], extension: str, faults: Faults) -> Iterator[SampleSpec]:
    for example in _nlvr_rows(paths, faults):
        pair, _, number = example.identifier.rpartition("-")
        if not pair or not number.isdigit():
            faults.append(Fault("identifier is not split-set-pair-sentence", example.identifier))
            continue
        annotation = Annotation(
            source="nlvr2",
            image_id=pair,
            **_nlvr_fields(example),
            left_url=example.left_url,
            right_url=example.right_url,
        )
        # The training images are in numbered folders.
        folder = "" if example.directory is None else f"{example.directory}/"
        left, right = (f"{folder}{pair}-img{side}.{extension}" for side in (0, 1))
        yield SampleSpec(key_of(example.identifier), (left, right), annotation)


def _nlvr_v1_sample(example: _NlvrRow, split: str, permutation: int) -> SampleSpec:
    image = f"{split}-{example.identifier}"
    name = f"{image}-{permutation}"
    annotation = Annotation(
        source="nlvr",
        image_id=image,  # the same for all permutations
        **_nlvr_fields(example),
        permutation=permutation,
        label_source=example.label_source,
    )
    folder = "" if example.directory is None else f"{example.directory}/"
    return SampleSpec(key_of(name), (str(PurePosixPath(f"{folder}{name}.png")),), annotation)


def _snli_ve_samples(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    pair_ids: set[str] = set()
    for path in paths:
        for pair in parse_rows(json_lines(path, faults), _SnliVeRow, faults):
            if pair.pairID in pair_ids:
                faults.append(Fault("pairID given twice", pair.pairID))
            elif pair.gold_label == "-":
                faults.append(Fault("no gold label", pair.pairID))
            elif pair.gold_label not in LABELS:
                faults.append(Fault("unknown label", f"{pair.pairID} ({pair.gold_label})"))
            elif not pair.sentence2.strip():
                faults.append(Fault("no hypothesis", pair.pairID))
            else:
                annotation = Annotation(
                    source="flickr30k",
                    image_id=pair.Flickr30K_ID,
                    premise=pair.sentence1,
                    hypothesis=pair.sentence2,
                    label=pair.gold_label,
                    pairID=pair.pairID,
                    captionID=pair.captionID,
                )
                yield SampleSpec(key_of(pair.pairID), (f"{pair.Flickr30K_ID}.jpg",), annotation)
            pair_ids.add(pair.pairID)
