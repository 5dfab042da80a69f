"""Train a lower-case WordPiece vocabulary on the texts of shards.

`--texts all` counts hypotheses, statements, questions with their answers and referring expressions
too, which a vocabulary of captions alone may spell letter by letter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from vlp.config import ConfigError
from vlp.data.schema import Annotation, captions_of, every_text_of
from vlp.data.shards.shard_index import BadSample, ShardIndex

if TYPE_CHECKING:
    from vlp.data.text.tokenizer import TextProcessor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--shards", type=Path, nargs="+", required=True, help="folders of shards")
    parser.add_argument("--size", type=int, required=True, help="tokens at most, specials included")
    parser.add_argument(
        "--texts", choices=("captions", "all"), default="captions", help="(default: captions)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer")


def run(arguments: argparse.Namespace) -> int:
    """Train on every text and save the tokenizer."""
    from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

    skipped: list[BadSample] = []
    said = captions_of if arguments.texts == "captions" else every_text_of
    texts = list(_texts(arguments.shards, said, skipped))
    # The length belongs to the model; `load` sets it again.
    text = TextProcessor(train_wordpiece(texts, arguments.size), max_tokens=512)
    _save(text, arguments.out)
    kind = "captions" if said is captions_of else "texts"
    print(f"{arguments.out}: {text.vocab_size} tokens from {len(texts)} {kind}")
    if skipped:
        print(f"  {len(skipped)} samples could not be read; the first: {skipped[0]}")
    return 0


def _save(text: TextProcessor, folder: Path) -> None:
    try:
        text.save(folder)
    except Exception as error:  # of a full disk, the tokenizer's library raises a bare Exception
        raise ConfigError(f"{folder}: cannot be written whole ({error}); run again") from error


def _texts(
    folders: list[Path], said: Callable[[Annotation], list[str]], skipped: list[BadSample]
) -> Iterator[str]:
    indexes = [ShardIndex.open(folder) for folder in folders]
    with tqdm(total=sum(map(len, indexes)), unit="sample", desc="texts") as bar:
        for index in indexes:
            for number, entry in enumerate(index.shards):
                for sample in range(entry.samples):
                    bar.update()
                    try:
                        yield from said(index.read_annotation(number, sample))
                    except BadSample as bad:
                        skipped.append(bad)
