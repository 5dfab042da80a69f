from __future__ import annotations

import pytest

from evaluation.samples import EvaluationError, Samples
from evaluation.words import named_words, word_positions, word_text
from vlp.data.schema import Annotation
from vlp.data.text import SPECIALS, TextProcessor, bert_tokenizer


def test_pieces_of_a_word_stand_together():
    words = ["re", "##d", "circle", ",", "a", "squ", "##a", "##re"]
    text = TextProcessor(
        bert_tokenizer({piece: place for place, piece in enumerate([*SPECIALS, *words])}), 12
    )
    pieces = text.words("a red circle, a Square unheard")
    positions = word_positions(pieces)
    found = [word_text(pieces, places) for places in positions]
    assert found == ["a", "red", "circle", ",", "a", "square", "[UNK]"]
    assert [list(places) for places in positions][1] == [2, 3]
    assert positions[-1].stop == len(pieces) - 1


def test_positions_agree_with_the_words_that_the_corpus_names(scene_shards, model_folder):
    text = TextProcessor.load(model_folder, 24)
    samples = Samples([scene_shards])
    asked = 0
    for place in range(len(samples)):
        sample = samples.read(place)
        for word in named_words(sample.annotation):
            pieces = text.words(sample.captions[word.caption])
            positions = word_positions(pieces)[word.position]
            assert word_text(pieces, positions) == word.word
            asked += 1
    assert asked > 100


def test_other_data_is_told_apart():
    with pytest.raises(EvaluationError, match="not the generated corpus"):
        named_words(Annotation(caption="a dog"))
