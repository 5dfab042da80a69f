"""Turn Conceptual Captions (CC3M) into shards.

    python -m data_tools cc3m --annotations Train_GCC-training.tsv --urls-only --out shards/cc3m
    img2dataset ...   (the command above prints it whole)
    python -m data_tools cc3m --annotations Train_GCC-training.tsv \\
        --img2dataset shards/cc3m/downloaded --out shards/cc3m

--annotations takes the official file (`caption<TAB>url`), gzipped or not. Images that lie in
folders, tars or zips are taken with --images and --names instead. img2dataset's own tars can also
be trained on as they are, their captions uncleaned: python -m data_tools index FOLDER.
"""

from __future__ import annotations

import argparse
from functools import partial

from data_tools.converters.corpora.web import WebList, add_web_arguments, read_tsv, run_web

CC3M = WebList(
    "cc3m",
    "Conceptual Captions (CC3M)",
    "the list: free for any purpose, with acknowledgement of Google LLC; the images are their "
    "owners'",
    partial(read_tsv, caption_first=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_web_arguments(parser, "Train_GCC-training.tsv or Validation_GCC-1.1.0-Validation.tsv")


def run(arguments: argparse.Namespace) -> int:
    """Convert; what was left out is printed and named in the manifest."""
    return run_web(arguments, CC3M)
