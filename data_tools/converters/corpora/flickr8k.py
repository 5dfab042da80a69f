"""Turn Flickr8k (or anything in Karpathy's layout) and its images into shards, a folder a split.

    python -m data_tools flickr8k --annotations dataset_flickr8k.json --images Images/ --out shards/flickr8k

writes OUT/train, OUT/val and OUT/test: tars, index.npz and manifest.json, which names what was
left out and why. Images are stored as they are, with all their captions. The command may be
interrupted and run again: finished shards stay.
"""  # noqa: E501 (a command to copy)

from __future__ import annotations

import argparse
from pathlib import Path

from data_tools.builder.build_corpus import make_corpus
from data_tools.builder.options import add_build_arguments
from data_tools.converters.corpora.karpathy import add_split_arguments, read_karpathy, split_parts

LICENCE = "Flickr's terms of use; given out by the authors for non-commercial research"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--annotations", type=Path, nargs="+", required=True, help="Karpathy-style JSON files"
    )
    add_split_arguments(parser)
    add_build_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert every split; what was left out is printed and named in the manifests."""
    entries = [entry for path in arguments.annotations for entry in read_karpathy(path)]
    parts = split_parts(entries, arguments.splits, arguments.max_words)
    return make_corpus(arguments, parts, title="Flickr8k", licence=LICENCE)
