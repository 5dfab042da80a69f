"""NLVR2 to shards: a statement about two images, true or false.

--annotations takes the official train.json, dev.json, test1.json... (one object a line, gzipped or
not). --images takes folders or tars (also compressed) with the images under their official names,
`<split>-<set>-<pair>-img0.png` (left) and `-img1.png` (right). A pair has several statements and
each is one sample, so its images are stored with each of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_tools.builder.build_benchmark import Rows, convert, key_of
from data_tools.builder.options import add_build_arguments
from data_tools.builder.sample_spec import Refused, SampleSpec
from data_tools.sources.annotation_rows import Faults, Row, json_lines, line_count, parsed
from vlp.data.schema import Annotation
from vlp.data.shards.sample_files import IMAGES

TRUTH = {"true": True, "false": False}
LICENCE = "annotations CC BY 4.0; the images' copyright stays with their owners"


class Nlvr2Row(Row):
    """A row of the official files; a hidden test set has no labels."""

    identifier: str
    sentence: str
    label: str | None = None
    directory: str | None = None
    left_url: str | None = None
    right_url: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations", type=Path, nargs="+", required=True, help="JSON lines files of one split"
    )
    parser.add_argument(
        "--extension", choices=IMAGES, default="png", help="of the images (default png)"
    )
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert; what is left out is printed and named in the manifest."""
    faults: Faults = []
    wanted = wanted_examples(arguments.annotations, arguments.extension, faults)
    rows = Rows(wanted, faults, line_count(arguments.annotations))
    return convert(arguments, [rows], title="NLVR2", licence=LICENCE)


def wanted_examples(paths: Sequence[Path], extension: str, faults: Faults) -> Iterator[SampleSpec]:
    """Yield one sample a statement, in the order of the files.

    Raises:
        ConfigError: a file cannot be read or is no NLVR2 file.
    """
    seen: set[str] = set()
    for path in paths:
        for example in parsed(json_lines(path, faults), Nlvr2Row, faults):
            identifier = example.identifier
            pair, _, number = identifier.rpartition("-")
            if identifier in seen:
                faults.append(Refused("identifier given twice", identifier))
            elif example.label is not None and example.label.lower() not in TRUTH:
                faults.append(Refused("unknown label", f"{identifier} ({example.label})"))
            elif not pair or not number.isdigit():
                faults.append(Refused("identifier is not split-set-pair-sentence", identifier))
            elif not example.sentence.strip():
                faults.append(Refused("no statement", identifier))
            else:
                yield _wanted(example, pair, extension)
            seen.add(identifier)


def _wanted(example: Nlvr2Row, pair: str, extension: str) -> SampleSpec:
    annotation = Annotation(
        source="nlvr2",
        image_id=pair,
        statement=example.sentence,
        label=None if example.label is None else TRUTH[example.label.lower()],
        identifier=example.identifier,
        left_url=example.left_url,
        right_url=example.right_url,
    )
    # The training images lie in numbered folders.
    folder = "" if example.directory is None else f"{example.directory}/"
    left, right = (f"{folder}{pair}-img{side}.{extension}" for side in (0, 1))
    return SampleSpec(key_of(example.identifier), (left, right), annotation)
