"""Train a lower-case WordPiece vocabulary on the captions of shards."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from vlp.data.schema import captions_of
from vlp.data.shards import BadSample, ShardIndex
from vlp.data.text import TextProcessor, train_wordpiece


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="folders of shards")
    parser.add_argument("--size", type=int, required=True, help="tokens at most, specials included")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer")


def run(arguments: argparse.Namespace) -> int:
    """Train on every caption and save the tokenizer."""
    skipped: list[BadSample] = []
    captions = list(_captions(arguments.shards, skipped))
    # The length belongs to the model; `load` sets it again.
    text = TextProcessor(train_wordpiece(captions, arguments.size), max_tokens=512)
    text.save(arguments.out)
    print(f"{arguments.out}: {text.vocab_size} tokens from {len(captions)} captions")
    if skipped:
        print(f"  {len(skipped)} samples could not be read; the first: {skipped[0]}")
    return 0


def _captions(folders: list[Path], skipped: list[BadSample]) -> Iterator[str]:
    indexes = [ShardIndex.open(folder) for folder in folders]
    with tqdm(total=sum(map(len, indexes)), unit="sample", desc="captions") as bar:
        for index in indexes:
            for number, entry in enumerate(index.shards):
                for sample in range(entry.samples):
                    bar.update()
                    try:
                        yield from captions_of(index.read_annotation(number, sample))
                    except BadSample as bad:
                        skipped.append(bad)
