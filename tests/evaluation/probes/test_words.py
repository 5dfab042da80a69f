"""Words of the generated corpus stand where its annotation says."""

from __future__ import annotations

from evaluation.samples import Samples
from vlp.data.text.tokenizer import TextProcessor
from vlp.data.text.word_boxes import named_words, word_positions, word_text


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
