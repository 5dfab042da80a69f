"""Make a model folder read another vocabulary, before it is trained further.

    python -m data_tools vocabulary --shards shards/mine/train --size 4000 --out shards/mine/words
    python launch/change_vocabulary.py --model runs/base/model --vocabulary shards/mine/words \\
        --out models/mine

Word pieces that both know keep their embedding; a new one starts as the mean of the pieces that the
old vocabulary makes of it, as long as they are. Worth it where a small vocabulary spells most words
of another corpus.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vlp.config import ConfigError
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.folder import CONFIG, from_pretrained, save_pretrained
from vlp.models.pretrained.change_vocabulary import with_vocabulary
from vlp.tasks.downstream.task import TASK


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the folder; returns the exit code (2: wrong input)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder or hub name")
    parser.add_argument(
        "--vocabulary", required=True, metavar="NAME", help="folder or hub name of the new one"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    chosen = parser.parse_args(arguments)
    try:
        change(chosen.model, chosen.vocabulary, chosen.out)
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def change(model: str, vocabulary: str, out: Path) -> None:
    """Write the model folder and print what became of the word pieces.

    Raises:
        ConfigError: the vocabulary is of no use.
        ValueError: the model is a fine-tuned one, whose answers are words of its own vocabulary.
        OSError: a folder is missing, or the new one holds a model already.
    """
    if (out / CONFIG).exists():
        raise FileExistsError(f"{out} already holds a model")
    loaded = from_pretrained(model)
    if loaded.folder is not None and (loaded.folder / TASK).exists():
        raise ValueError(f"{model} is fine-tuned on a task; change the vocabulary of its start")
    text = TextProcessor.load(vocabulary, loaded.text.max_tokens)
    made, counts = with_vocabulary(loaded, text.tokenizer)
    state = made.model.state_dict()
    save_pretrained(out, made.model.config, state, made.text, made.preprocess, made.heads)
    print(
        f"{out}: {made.text.vocab_size} word pieces, {counts.known} known, {counts.composed} put "
        f"together from others, {counts.unknown} start as the unknown word"
    )


if __name__ == "__main__":
    sys.exit(main())
