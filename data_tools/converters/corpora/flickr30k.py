"""Turn Flickr30k and its images into shards, a folder a split.

    python -m data_tools flickr30k --annotations dataset_flickr30k.json \\
        --images flickr30k-images/ --out shards/flickr30k

--annotations takes Karpathy's JSON, which has the splits everybody evaluates on, or the official
results_20130124.token (`IMAGE.jpg#0<TAB>caption`), which has none: name the lists of images
then (--lists train.txt val.txt test.txt, one image a line, with or without .jpg), or everything
goes to OUT/all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_tools.builder.build_corpus import make_corpus
from data_tools.builder.options import add_build_arguments
from data_tools.converters.corpora.karpathy import (
    Entry,
    add_split_arguments,
    read_karpathy,
    split_parts,
)
from data_tools.sources.annotation_rows import text_lines
from vlp.config import ConfigError

SOURCE = "flickr30k"
LICENCE = "Flickr's terms of use; given out by the authors for non-commercial research"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations",
        type=Path,
        required=True,
        help="dataset_flickr30k.json, or results_20130124.token",
    )
    parser.add_argument(
        "--lists",
        type=Path,
        nargs="+",
        metavar="SPLIT.txt",
        help="images of each split, for the .token file; the file's name is the split's",
    )
    add_split_arguments(parser)
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert every split; what was left out is printed and named in the manifests."""
    if arguments.annotations.suffix == ".json":
        if arguments.lists:
            raise ConfigError("--lists: the JSON has its own splits; leave this out")
        entries = read_karpathy(arguments.annotations)
    else:
        entries = read_tokens(arguments.annotations, arguments.lists or [])
    parts = split_parts(entries, arguments.splits, arguments.max_words)
    return make_corpus(arguments, parts, title="Flickr30k", licence=LICENCE)


def read_tokens(path: Path, lists: Sequence[Path]) -> list[Entry]:
    """Read `IMAGE.jpg#NUMBER<TAB>CAPTION` lines, in the order of the images.

    Args:
        path: the .token file.
        lists: images of each split; one that is in none of them is left out. Without lists the
            split of all is `all`.

    Raises:
        ConfigError: a file cannot be read, a line has another layout, or an image is in two
            lists.
    """
    splits: dict[str, str] = {}
    for file in lists:
        for line in text_lines(file):
            name = line.strip().removesuffix(".jpg")
            if splits.setdefault(name, file.stem) != file.stem:
                raise ConfigError(f"{file}: {name} is in {splits[name]} too")
    captions: dict[str, list[str]] = {}
    for number, line in enumerate(text_lines(path), 1):
        name, tab, caption = line.partition("\t")
        image, mark, _ = name.partition("#")
        if not (tab and mark):
            raise ConfigError(f"{path}, line {number}: this should be IMAGE.jpg#NUMBER<TAB>CAPTION")
        captions.setdefault(image, []).append(caption)
    entries = []
    for image, texts in captions.items():
        stem = Path(image).stem
        split = splits.get(stem) if lists else "all"
        if split is not None:
            entries.append(Entry(image, split, texts, SOURCE, stem))
    return entries
