"""Token positions of a caption's words, and the image patches that they name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlp.data.boxes import overlaps
from vlp.data.schema import Annotation, Word, caption_indices


def patches_in_box(
    box: Sequence[float], grid: tuple[int, int], size: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return (rows * columns,) bool, True for patches with their centre in the box; at least one.

    box: [x, y, width, height] in pixels of an image of `size` (width, height), squashed to `grid`.
    """
    rows, columns = grid
    x, y, width, height = box
    centres_x = (np.arange(columns) + 0.5) * size[0] / columns
    centres_y = (np.arange(rows) + 0.5) * size[1] / rows
    inside = np.logical_and.outer(
        (centres_y >= y) & (centres_y < y + height), (centres_x >= x) & (centres_x < x + width)
    )
    if not inside.any():
        row = int(np.clip((y + height / 2) * rows / size[1], 0, rows - 1))
        column = int(np.clip((x + width / 2) * columns / size[0], 0, columns - 1))
        inside[row, column] = True
    return inside.ravel()


# Codes of a word's patches: inside one of its own boxes, and inside another word's box only.
OWN, OTHER = 1, 2


def words_with_boxes(annotation: Annotation) -> list[Word]:
    """Return the words with boxes; `Word.caption` becomes an index into `captions_of`."""
    # From indices among all captions to indices among those that are not empty.
    new_index = {old: new for new, old in enumerate(caption_indices(annotation))}
    return [
        word.model_copy(update={"caption": new_index[word.caption]})
        for word in annotation.words or ()
        if word.caption in new_index
    ]


def token_positions(pieces: Sequence[str]) -> list[range]:
    """Return the token positions of each word, given a caption's pieces from [CLS] to [SEP]."""
    last = len(pieces) - 1
    starts = [position for position in range(1, last) if not pieces[position].startswith("##")]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], last])]


def word_text(pieces: Sequence[str], positions: range) -> str:
    """Return the word at token positions, as normalised by the tokenizer."""
    return "".join(pieces[position].removeprefix("##") for position in positions)


def word_patches(
    annotation: Annotation,
    caption_index: int,
    pieces: Sequence[str],
    max_tokens: int,
    grid: tuple[int, int],
    size: tuple[int, int],
) -> NDArray[np.int8]:
    """Return (max_tokens, patches) int8 of a caption: OWN, OTHER, or 0 (tokens without a box).

    `pieces` are the caption's, from [CLS] to [SEP]; `size` is the image's (width, height). Boxes
    outside the image are ignored.
    """
    patches = np.zeros((max_tokens, grid[0] * grid[1]), dtype=np.int8)
    words = words_with_boxes(annotation)
    # Many words name few objects: the patches of a box are computed once.
    boxes = {box for word in words for box in word.boxes if overlaps(box, size)}
    inside = {box: patches_in_box(box, grid, size) for box in boxes}
    positions_by_word = token_positions(pieces)
    for word in words:
        is_cut = word.index >= len(positions_by_word)
        word_masks = [inside[box] for box in word.boxes if box in inside]
        if word.caption != caption_index or is_cut or not word_masks:
            continue
        row = np.zeros(patches.shape[1], dtype=np.int8)
        for mask in inside.values():
            row[mask] = OTHER
        for mask in word_masks:
            row[mask] = OWN
        patches[list(positions_by_word[word.index])] = row
    return patches
