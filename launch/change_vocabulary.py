"""Change of a model folder's vocabulary; this script is `vlp change-vocabulary`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from vlp.data.text.tokenizer import TextProcessor
from vlp.models.folder import from_pretrained, save_pretrained
from vlp.models.pretrained.change_vocabulary import with_vocabulary
from vlp.models.pretrained.local_copy import CONFIG
from vlp.tasks.downstream.task import has_task


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vlp change-vocabulary`; returns the exit code (2: wrong input)."""
    from launch.cli.main import run_script

    return run_script("change-vocabulary", arguments)


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
    if loaded.folder is not None and has_task(loaded.folder):
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
