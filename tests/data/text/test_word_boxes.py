import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.data.masking import mask_patches, mask_words
from vlp.data.schema import Annotation
from vlp.data.text.tokenizer import SPECIALS, TextProcessor, bert_tokenizer
from vlp.data.text.word_boxes import (
    OTHER,
    OWN,
    patches_in_box,
    token_positions,
    word_patches,
    word_text,
    words_with_boxes,
)


def test_pieces_of_a_word_stand_together():
    words = ["re", "##d", "circle", ",", "a", "squ", "##a", "##re"]
    text = TextProcessor(
        bert_tokenizer({piece: place for place, piece in enumerate([*SPECIALS, *words])}), 12
    )
    pieces = text.pieces("a red circle, a Square unheard")
    positions = token_positions(pieces)
    texts = [word_text(pieces, places) for places in positions]
    assert texts == ["a", "red", "circle", ",", "a", "square", "[UNK]"]
    assert [list(places) for places in positions][1] == [2, 3]
    assert positions[-1].stop == len(pieces) - 1


def test_named_patches_are_the_boxes_of_the_named_objects():
    left, right = [0.0, 0.0, 4.0, 8.0], [4.0, 4.0, 4.0, 4.0]
    words = [
        {"caption": 0, "index": 0, "word": "red", "kind": "colour", "box": left},
        {"caption": 0, "index": 2, "word": "blue", "kind": "colour", "box": right},
        {"caption": 1, "index": 0, "word": "blue", "kind": "colour", "box": right},
        {"caption": 0, "index": 9, "word": "cut", "kind": "shape", "box": right},
        {"caption": 0, "index": 1, "word": "and", "kind": "shape", "box": [8.0, 0.0, 4.0, 4.0]},
    ]
    scene = Annotation(captions=["red and blue", "blue"], words=words)
    pieces = ["[CLS]", "r", "##ed", "and", "blue", "[SEP]"]
    shown = word_patches(scene, 0, pieces, 8, (2, 2), (8, 8))
    in_left, in_right = [OWN, 0, OWN, OTHER], [OTHER, 0, OTHER, OWN]
    nothing = [0, 0, 0, 0]
    assert shown.tolist() == [nothing, in_left, in_left, nothing, in_right, *[nothing] * 3]


def test_a_word_of_several_boxes_names_what_lies_in_any():
    left, right, low = [0.0, 0.0, 4.0, 4.0], [4.0, 0.0, 4.0, 4.0], [0.0, 4.0, 8.0, 4.0]
    dogs = {"caption": 0, "index": 0, "word": "dogs", "kind": "objects", "box": left}
    mat = {"caption": 0, "index": 1, "word": "mat", "kind": "object", "box": low}
    scene = Annotation(captions=["dogs mat"], words=[dogs | {"others": [right]}, mat])
    boxes = [word.boxes for word in words_with_boxes(scene)]
    assert boxes == [(tuple(left), tuple(right)), (tuple(low),)]
    shown = word_patches(scene, 0, ["[CLS]", "dogs", "mat", "[SEP]"], 4, (2, 2), (8, 8))
    assert shown.tolist()[1:3] == [[OWN, OWN, OTHER, OTHER], [OTHER, OTHER, OWN, OWN]]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(4, 40), st.integers(4, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_patches_equal_a_loop_over_centres(rows, columns, width, height, data):
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    w, h = data.draw(st.integers(1, width - x)), data.draw(st.integers(1, height - y))
    expected = []
    for row in range(rows):
        for column in range(columns):
            # Compared as whole numbers: centre (2 row + 1) height / (2 rows).
            down, across = (2 * row + 1) * height, (2 * column + 1) * width
            inside_down = 2 * rows * y <= down < 2 * rows * (y + h)
            expected.append(inside_down and 2 * columns * x <= across < 2 * columns * (x + w))
    inside = patches_in_box((x, y, w, h), (rows, columns), (width, height))
    assert inside.shape == (rows * columns,)
    if any(expected):
        assert inside.tolist() == expected
    else:
        assert inside.sum() == 1


SPECIAL = (0, 1, 2, 3, 4)


def mask_ids(ids, words, probability, seed):
    rng = np.random.default_rng(seed)
    return mask_words(ids, words, probability, 50, 4, SPECIAL, rng)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.floats(0.01, 0.99), st.integers(0, 99))
def test_only_words_are_masked_and_at_least_one(words, share, seed):
    mask = np.array(words)
    ids = np.where(mask, np.arange(len(words)) + 10, 0)
    before = ids.copy()
    new, labels = mask_ids(ids, mask, share, seed)
    chosen = labels != -100
    assert not (chosen & ~mask).any()
    assert chosen.any() == mask.any()
    assert (labels[chosen] == ids[chosen]).all()
    assert (new[~chosen] == ids[~chosen]).all()
    assert (ids == before).all()
    assert new.dtype == labels.dtype == np.int64


def test_masking_proportions():
    ids = np.full(20_000, 10)
    new, labels = mask_ids(ids, np.ones(20_000, dtype=bool), 0.15, 0)
    chosen = labels != -100
    assert abs(chosen.mean() - 0.15) < 0.01
    kinds = new[chosen]
    assert abs((kinds == 4).mean() - 0.8) < 0.03
    unchanged = (kinds == 10).mean()
    assert abs(unchanged - 0.1) < 0.03
    words = kinds[(kinds != 4) & (kinds != 10)]
    assert abs(len(words) / len(kinds) - 0.1) < 0.03
    assert set(words) == set(range(5, 50)) - {10}


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 3),
    st.floats(0.05, 0.95),
    st.integers(0, 9),
)
def test_patches(rows, columns, unit, ratio, seed):
    mask = mask_patches((rows, columns), ratio, unit, np.random.default_rng(seed))
    assert mask.shape == (rows, columns)
    assert mask.dtype == bool
    count = 0
    for row in range(0, rows, unit):
        for column in range(0, columns, unit):
            square = mask[row : row + unit, column : column + unit]
            assert square.all() or not square.any()
            count += bool(square.all())
    squares = math.ceil(rows / unit) * math.ceil(columns / unit)
    assert count == math.ceil(squares * ratio)
