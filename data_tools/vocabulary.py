"""A WordPiece vocabulary of the texts of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from tqdm import tqdm
from typer import Option

from data_tools.options import N
from vlp.config import ConfigError
from vlp.data.schema import Annotation, all_texts_of, captions_of
from vlp.data.shards.shard_reader import BadSample, ShardIndex


def vocabulary(
    shards: Annotated[list[Path], Option(metavar="FOLDER", help="folders of shards")],
    size: Annotated[int, N(help="tokens at most, specials included")],
    out: Annotated[Path, Option(metavar="DIR", help="folder of the tokenizer")],
    texts: Annotated[Literal["captions", "all"], Option(help="texts that count")] = "captions",
) -> int:
    """Train a lower-case WordPiece vocabulary on the texts of shards.

    --texts all counts hypotheses, statements, questions with their answers and referring
    expressions too, which a vocabulary of captions alone may spell letter by letter.
    """
    from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

    skipped: list[BadSample] = []
    texts_of = captions_of if texts == "captions" else all_texts_of
    corpus = list(_texts(shards, texts_of, skipped))
    # The length belongs to the model; `load` sets it again.
    text = TextProcessor(train_wordpiece(corpus, size), max_tokens=512)
    try:
        text.save(out)
    # Of a full disk the tokenizer's library raises a bare Exception.
    except Exception as error:
        raise ConfigError(f"{out}: cannot be written whole ({error}); run again") from error
    kind = "captions" if texts == "captions" else "texts"
    print(f"{out}: {text.vocab_size} tokens from {len(corpus)} {kind}")
    if skipped:
        print(f"  {len(skipped)} samples could not be read; the first: {skipped[0]}")
    return 0


def _texts(
    folders: list[Path], texts_of: Callable[[Annotation], list[str]], skipped: list[BadSample]
) -> Iterator[str]:
    indexes = [ShardIndex.open(folder) for folder in folders]
    with tqdm(total=sum(map(len, indexes)), unit="sample", desc="texts") as bar:
        for index in indexes:
            for annotation in index.annotations():
                bar.update()
                if isinstance(annotation, BadSample):
                    skipped.append(annotation)
                else:
                    yield from texts_of(annotation)
