"""Where the words of a caption stand among its tokens, and what they name in a scene."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.samples import EvaluationError
from vlp.data.schema import Annotation


class NamedWord(NamedTuple):
    """Word number `position` of caption number `caption` says the `kind` of what lies in `box`.

    kind is `colour` or `shape`; box is [x, y, width, height] in pixels of the picture.
    """

    caption: int
    position: int
    word: str
    kind: str
    box: tuple[float, ...]


def named_words(annotation: Annotation) -> list[NamedWord]:
    """The words of a generated scene's captions that name an object.

    Raises:
        EvaluationError: the sample is no generated scene.
    """
    entries = (annotation.scene or {}).get("words")
    if entries is None:
        raise EvaluationError(
            "these shards are not the generated corpus: a sample has no scene with named words; "
            "write some with `python -m data_tools scenes`"
        )
    return [
        NamedWord(
            entry["caption"], entry["index"], entry["word"], entry["kind"], tuple(entry["box"])
        )
        for entry in entries
    ]


def word_positions(pieces: Sequence[str]) -> list[range]:
    """Token positions of each word, from the word pieces of one caption.

    A word (or punctuation mark) starts at a piece without `##`. The first and the last piece are
    [CLS] and [SEP] and belong to no word.
    """
    last = len(pieces) - 1
    starts = [place for place in range(1, last) if not pieces[place].startswith("##")]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], last])]


def word_text(pieces: Sequence[str], positions: range) -> str:
    """The word that stands at some positions, as the tokenizer sees it."""
    return "".join(pieces[place].removeprefix("##") for place in positions)
