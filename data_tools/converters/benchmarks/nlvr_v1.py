"""NLVR v1 to shards: a statement about one image of three boxes, true or false.

--annotations takes the official {train,dev,test}.json (one object a line, gzipped or not). --images
takes folders or tars (also compressed) with `<split>-<identifier>-<permutation>.png`; --split is
that name's first part. The release shows each example in six permutations, the same three boxes
in another order, and its official score counts all six (--permutations 6). Where only permutation 0
is there, the others are made from it. Images are stored as RGB.

--hold-out makes two folders, OUT/kept and OUT/held_out, of whole presentations: examples that share
the first part of their identifier share their statement too.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from data_tools.builder.build_benchmark import Rows, convert, key_of
from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.converters.benchmarks.nlvr2 import TRUTH
from data_tools.sources.annotation_rows import Faults, Row, json_lines, line_count, parsed
from data_tools.sources.image_sources import ImageLocation, Originals
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import BadSample

if TYPE_CHECKING:
    from PIL import Image

PERMUTATIONS = tuple(itertools.permutations(range(3)))
"""Box i of the image of permutation k is box `PERMUTATIONS[k][i]` of permutation 0's."""

LICENCE = "CC BY 4.0"
SIZE = (400, 100)
_BOX_LEFTS = (0, 150, 300)
_BOX_SIDE = 100
_NAME = re.compile(r"(.+-)([1-5])(\.png)")


class NlvrV1Row(Row):
    """A row of the official files."""

    identifier: str
    sentence: str
    label: str | None = None
    directory: str | None = None
    label_source: str | None = None


class PermutedPlace(ImageLocation):
    """An image of NLVR whose boxes are put into another order when it is read."""

    order: tuple[int, ...] = PERMUTATIONS[0]

    def read(self) -> bytes:
        """Return the image as an RGB PNG.

        Raises:
            BadSample: it cannot be read, or has another size than NLVR's, so its boxes are
                elsewhere.
        """
        from vlp.data.image.decode import decode_image

        image = decode_image(super().read(), str(self.path))
        if image.size != SIZE:
            size = f"{image.width} x {image.height} pixels, NLVR's have 400 x 100"
            raise BadSample("unreadable image", f"{self.path} ({size})")
        stream = io.BytesIO()
        permuted(image, self.order).save(stream, "png")
        return stream.getvalue()


class PermutedOriginals(Originals):
    """Images of NLVR; permutations that are not there are made from permutation 0."""

    def find(self, name: str) -> ImageLocation | None:
        """Find an image, or the one that it is made from; None: neither is there."""
        place, order = super().find(name), PERMUTATIONS[0]
        parts = _NAME.fullmatch(name)
        if place is None and parts is not None:
            place = super().find(f"{parts[1]}0{parts[3]}")
            order = PERMUTATIONS[int(parts[2])]
        if place is None:
            return None
        found = PermutedPlace(*place)
        found.order = order
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations", type=Path, nargs="+", required=True, help="JSON lines files of one split"
    )
    parser.add_argument("--split", required=True, help="how the images' names begin: train, dev…")
    parser.add_argument(
        "--permutations",
        type=int,
        default=1,
        metavar="N",
        help="of each example, 1 to 6 (default 1)",
    )
    parser.add_argument(
        "--hold-out", type=float, default=0.0, metavar="SHARE", help="of the presentations, 0 to 1"
    )
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert; what is left out is printed and named in the manifest.

    Raises:
        ConfigError: a number is out of range, or no row can be used.
    """
    if not 1 <= arguments.permutations <= len(PERMUTATIONS):
        raise ConfigError(f"--permutations is {arguments.permutations}, 1 to 6 are possible")
    if not 0 <= arguments.hold_out < 1:
        raise ConfigError(f"--hold-out is {arguments.hold_out}, a share from 0 up to 1 is possible")
    total = line_count(arguments.annotations) * arguments.permutations
    if arguments.hold_out:
        folders = [_rows(arguments, "kept", None), _rows(arguments, "held_out", None)]
    else:
        folders = [_rows(arguments, "", total)]
    title = f"NLVR v1 {arguments.split}"
    return convert(arguments, folders, title=title, licence=LICENCE, originals=PermutedOriginals)


def wanted_examples(
    paths: Sequence[Path], split: str, permutations: int, faults: Faults
) -> Iterator[tuple[str, SampleSpec]]:
    """Yield presentation and sample of each example and permutation, in the order of the files.

    Raises:
        ConfigError: a file cannot be read or is no NLVR file.
    """
    seen: set[str] = set()
    for path in paths:
        for example in parsed(json_lines(path, faults), NlvrV1Row, faults):
            identifier = example.identifier
            if identifier in seen:
                faults.append(Refused("identifier given twice", identifier))
            elif example.label is not None and example.label.lower() not in TRUTH:
                faults.append(Refused("unknown label", f"{identifier} ({example.label})"))
            elif not example.sentence.strip():
                faults.append(Refused("no statement", identifier))
            else:
                presentation = identifier.partition("-")[0]
                for permutation in range(permutations):
                    yield presentation, _wanted(example, split, permutation)
            seen.add(identifier)


def is_held_out(presentation: str, share: float) -> bool:
    """Return whether a presentation belongs to the held-out share: a function of its name alone."""
    number = int.from_bytes(hashlib.sha256(presentation.encode()).digest()[:8], "big")
    return number < share * 2**64


def permuted(image: Image.Image, order: Sequence[int]) -> Image.Image:
    """Return an image of NLVR with its boxes in another order; box i becomes box `order[i]`."""
    result = image.copy()
    for left, box in zip(_BOX_LEFTS, order):
        start = _BOX_LEFTS[box]
        result.paste(image.crop((start, 0, start + _BOX_SIDE, SIZE[1])), (left, 0))
    return result


def _rows(arguments: argparse.Namespace, folder: str, total: int | None) -> Rows:
    faults: Faults = []
    examples = wanted_examples(
        arguments.annotations, arguments.split, arguments.permutations, faults
    )
    wanted = (
        sample
        for presentation, sample in examples
        if not folder or is_held_out(presentation, arguments.hold_out) == (folder == "held_out")
    )
    return Rows(wanted, faults, total, folder)


def _wanted(example: NlvrV1Row, split: str, permutation: int) -> SampleSpec:
    image = f"{split}-{example.identifier}"
    name = f"{image}-{permutation}"
    annotation = Annotation(
        source="nlvr",
        image_id=image,  # whatever the order of its boxes
        statement=example.sentence,
        label=None if example.label is None else TRUTH[example.label.lower()],
        identifier=example.identifier,
        permutation=permutation,
        label_source=example.label_source,
    )
    folder = "" if example.directory is None else f"{example.directory}/"
    return SampleSpec(key_of(name), (str(PurePosixPath(f"{folder}{name}.png")),), annotation)
