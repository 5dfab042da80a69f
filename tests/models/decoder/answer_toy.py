"""A small decoder with a vocabulary of 24 and a list of answers, for several tests."""

from __future__ import annotations

import torch
from tests_support import TINY_MODEL

from vlp.models.config import ModelConfig
from vlp.models.decoder import AnswerDecoder, AnswerDecoderConfig
from vlp.models.vlp import VLPModel
from vlp.objectives.mlm import MLMHead

PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = 24


def model(layout="ace", layers=2):
    values = {**TINY_MODEL, "text": {**TINY_MODEL["text"], "vocab_size": WORDS}}
    values["cross"] = {**values["cross"], "layout": layout, "layers": layers}
    return VLPModel(ModelConfig.model_validate(values)).double()


def decoder(of=None, seed=1, **options):
    """In float64, with weights that are far from zero so that words differ in likelihood."""
    of = of or model()
    torch.manual_seed(seed)
    config = AnswerDecoderConfig.model_validate({"layers": 2, **options})
    made = AnswerDecoder(config, of.config, MLMHead(of.config.text.width, WORDS)).double()
    with torch.no_grad():
        for weights in made.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    return made.eval()


def embedding(of):
    words = of.text_encoder.embedding
    with torch.no_grad():
        words.word.weight.add_(torch.randn_like(words.word.weight))
    return words


def padded(texts):
    """[CLS] words [SEP], padded."""
    ids = torch.full((len(texts), max(map(len, texts)) + 2), PAD)
    for row, text in enumerate(texts):
        ids[row, : len(text) + 2] = torch.tensor([CLS, *text, SEP])
    return ids
