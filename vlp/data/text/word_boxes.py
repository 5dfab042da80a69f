"""Token positions of the words of a caption, and the boxes that they name in an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlp.data.schema import Annotation, caption_numbers


def patches_in_box(
    box: Sequence[float], grid: tuple[int, int], size: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return (rows * columns,) bool, patches with their centre in the box; at least one.

    box: [x, y, width, height] in pixels of an image of `size` (width, height), which is squashed.
    """
    rows, columns = grid
    x, y, width, height = box
    across = (np.arange(columns) + 0.5) * size[0] / columns
    down = (np.arange(rows) + 0.5) * size[1] / rows
    inside = np.logical_and.outer(
        (down >= y) & (down < y + height), (across >= x) & (across < x + width)
    )
    if not inside.any():
        row = int(np.clip((y + height / 2) * rows / size[1], 0, rows - 1))
        column = int(np.clip((x + width / 2) * columns / size[0], 0, columns - 1))
        inside[row, column] = True
    return inside.ravel()


OWN, OTHER = 1, 2


class WordBox(NamedTuple):
    """Word `position` of caption `caption`: the `kind` of the thing in `box` or `others`."""

    caption: int
    position: int
    word: str
    kind: str  # as in `Word`
    # [x, y, width, height] in pixels, as are `others`.
    box: tuple[float, ...]
    others: tuple[tuple[float, ...], ...] = ()

    @property
    def boxes(self) -> tuple[tuple[float, ...], ...]:
        """All boxes that the word may mean."""
        return (self.box, *self.others)


def words_with_boxes(annotation: Annotation) -> list[WordBox]:
    """Return the words with known boxes; captions are numbered as in `captions_of`."""
    if not annotation.words:
        return []
    index = {number: position for position, number in enumerate(caption_numbers(annotation))}
    return [
        WordBox(
            index[word.caption],
            word.index,
            word.word,
            word.kind,
            tuple(word.box),
            tuple(tuple(box) for box in word.others or ()),
        )
        for word in annotation.words
        if word.caption in index
    ]


def word_positions(pieces: Sequence[str]) -> list[range]:
    """Return each word's token positions from word pieces, [CLS] and [SEP] at the ends."""
    last = len(pieces) - 1
    starts = [position for position in range(1, last) if not pieces[position].startswith("##")]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], last])]


def word_text(pieces: Sequence[str], positions: range) -> str:
    """Return the word at some positions, as the tokenizer sees it."""
    return "".join(pieces[position].removeprefix("##") for position in positions)


def word_patches(
    annotation: Annotation,
    caption: int,
    pieces: Sequence[str],
    tokens: int,
    grid: tuple[int, int],
    size: tuple[int, int],
) -> NDArray[np.int8]:
    """Return (tokens, patches) int8: OWN in the token's own box, OTHER in another's, else 0.

    `pieces` include [CLS] and [SEP]; `tokens` is the padded length; `size` is (width, height).
    """
    patches = np.zeros((tokens, grid[0] * grid[1]), dtype=np.int8)
    words = words_with_boxes(annotation)
    # Many words name few objects: each box is looked at once.
    distinct = {box for word in words for box in word.boxes}
    boxes = {box: patches_in_box(box, grid, size) for box in distinct}
    positions = word_positions(pieces)
    for word in words:
        if word.caption != caption or word.position >= len(positions):
            continue
        row = np.zeros(patches.shape[1], dtype=np.int8)
        for inside in boxes.values():
            row[inside] = OTHER
        for box in word.boxes:
            row[boxes[box]] = OWN
        patches[list(positions[word.position])] = row
    return patches
