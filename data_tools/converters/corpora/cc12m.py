"""Turn Conceptual 12M (CC12M) into shards.

    python -m data_tools cc12m --annotations cc12m.tsv --urls-only --out shards/cc12m
    img2dataset ...   (the command above prints it whole)
    python -m data_tools cc12m --annotations cc12m.tsv \\
        --img2dataset shards/cc12m/downloaded --out shards/cc12m

--annotations takes the official file (`url<TAB>caption`), gzipped or not; `<PERSON>` in a caption
becomes `person`. Images that lie in folders, tars or zips are taken with --images and --names
instead. img2dataset's own tars can also be trained on as they are, their captions uncleaned:
python -m data_tools index FOLDER.
"""

from __future__ import annotations

import argparse
from functools import partial

from data_tools.converters.corpora.web import WebList, add_web_arguments, read_tsv, run_web

CC12M = WebList(
    "cc12m",
    "Conceptual 12M (CC12M)",
    "the list: free for any purpose, with acknowledgement of Google LLC; the images are their "
    "owners'",
    partial(read_tsv, caption_first=False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_web_arguments(parser, "cc12m.tsv")


def run(arguments: argparse.Namespace) -> int:
    """Convert; what was left out is printed and named in the manifest."""
    return run_web(arguments, CC12M)
