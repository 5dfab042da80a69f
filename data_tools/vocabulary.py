"""`vlp data vocabulary`: a WordPiece vocabulary of the texts of shards."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from tqdm import tqdm
from typer import Option

from data_tools.options import N
from vlp.config import ConfigError
from vlp.data.schema import all_texts_of, captions_of
from vlp.data.shards.shard_reader import BadSample, ShardIndex


def vocabulary(
    shards: Annotated[list[Path], Option(metavar="FOLDER", help="folders of shards")],
    size: Annotated[int, N(help="tokens at most, specials included")],
    out: Annotated[Path, Option(metavar="DIR", help="folder of the tokenizer")],
    texts: Annotated[Literal["captions", "all"], Option(help="texts to train on")] = "captions",
) -> int:
    """Train a lower-case WordPiece vocabulary on the texts of shards.

    --texts all adds hypotheses, statements, questions with answers and referring expressions; a
    vocabulary of captions alone may split their words into letters.
    """
    from vlp.data.text.tokenizer import TextProcessor, train_wordpiece

    skipped: list[BadSample] = []
    texts_of = captions_of if texts == "captions" else all_texts_of
    corpus: list[str] = []
    indexes = [ShardIndex.open(folder) for folder in shards]
    annotations = chain.from_iterable(index.annotations() for index in indexes)
    for annotation in tqdm(annotations, total=sum(map(len, indexes)), unit="sample", desc="texts"):
        if isinstance(annotation, BadSample):
            skipped.append(annotation)
        else:
            corpus += texts_of(annotation)
    # The maximum length belongs to the model; loading the tokenizer sets it.
    tokenizer = TextProcessor(train_wordpiece(corpus, size), max_tokens=512)
    try:
        tokenizer.save(out)
    except Exception as error:  # tokenizers raises bare Exception, for a full disk too
        raise ConfigError(f"{out}: cannot be written completely ({error}); run again") from error
    kind = "captions" if texts == "captions" else "texts"
    print(f"{out}: {tokenizer.vocab_size} tokens from {len(corpus)} {kind}")
    if skipped:
        print(f"  {len(skipped)} samples could not be read; the first: {skipped[0]}")
    return 0
