"""SNLI-VE (and e-SNLI-VE in its field names) to shards: an image, a hypothesis and its label.

--annotations takes the official snli_ve_{train,dev,test}.jsonl, gzipped or not. --images takes
folders or tars (also compressed) that hold Flickr30k's images as <Flickr30K_ID>.jpg. Each pair is
one sample with its image, so the image of several pairs is stored several times; --max-side
keeps that small. Pairs without a gold label ("-") are left out and counted.
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

LABELS = ("entailment", "neutral", "contradiction")
NO_CONSENSUS = "-"
LICENCE = "SNLI: CC BY-SA 4.0; images: Flickr's, for research and education only"


class SnliVeRow(Row):
    """A row of the official files."""

    Flickr30K_ID: str
    pairID: str
    sentence2: str
    gold_label: str
    sentence1: str | None = None
    captionID: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations", type=Path, nargs="+", required=True, help="JSON lines files of one split"
    )
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert; what is left out is printed and named in the manifest."""
    faults: Faults = []
    wanted = wanted_pairs(arguments.annotations, faults)
    rows = Rows(wanted, faults, line_count(arguments.annotations))
    return convert(arguments, [rows], title="SNLI-VE", licence=LICENCE)


def wanted_pairs(paths: Sequence[Path], faults: Faults) -> Iterator[SampleSpec]:
    """Yield one sample a pair, in the order of the files.

    Raises:
        ConfigError: a file cannot be read or is no SNLI-VE file.
    """
    seen: set[str] = set()
    for path in paths:
        for pair in parsed(json_lines(path, faults), SnliVeRow, faults):
            if pair.pairID in seen:
                faults.append(Refused("pairID given twice", pair.pairID))
            elif pair.gold_label == NO_CONSENSUS:
                faults.append(Refused("no gold label", pair.pairID))
            elif pair.gold_label not in LABELS:
                faults.append(Refused("unknown label", f"{pair.pairID} ({pair.gold_label})"))
            elif not pair.sentence2.strip():
                faults.append(Refused("no hypothesis", pair.pairID))
            else:
                yield _wanted(pair)
            seen.add(pair.pairID)


def _wanted(pair: SnliVeRow) -> SampleSpec:
    annotation = Annotation(
        source="flickr30k",
        image_id=pair.Flickr30K_ID,
        premise=pair.sentence1,
        hypothesis=pair.sentence2,
        label=pair.gold_label,
        pairID=pair.pairID,
        captionID=pair.captionID,
    )
    return SampleSpec(key_of(pair.pairID), (f"{pair.Flickr30K_ID}.jpg",), annotation)
