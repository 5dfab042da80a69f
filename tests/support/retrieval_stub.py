"""A stand-in for a model: features and match scores are given, so every rank is known."""

import io
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vlp.data.schema import Annotation
from vlp.data.shards.shard_reader import ShardWriter
from vlp.data.text.tokenizer import TextTokens


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_numbered(folder, captions, samples_per_shard=3):
    """Image i is a colour that says i and has captions[i] captions 'i.k'."""
    with ShardWriter(folder, samples_per_shard=samples_per_shard) as writer:
        for number, count in enumerate(captions):
            texts = [f"{number} {slot}" for slot in range(count)]
            writer.write(f"{number:04d}", png((number, 0, 0)), "png", Annotation(captions=texts))


class StubFeatures(NamedTuple):
    feature: torch.Tensor
    number: torch.Tensor

    def select(self, indices):
        return StubFeatures(*(field[indices] for field in self))


class StubModel(torch.nn.Module):
    """Features and match scores from given tables; text k of image i is row `first[i] + k`."""

    match_is_trained = True

    def __init__(self, image, text, match, first):
        super().__init__()
        self.image, self.text, self.scores = image, text, match
        self.first = torch.as_tensor(first)
        self.calls: list[int] = []

    def temperature(self):
        return torch.tensor(0.07, dtype=torch.float64)

    def encode_image(self, pixels):
        assert not self.training
        number = pixels[:, 0, 0, 0].long()
        return StubFeatures(self.image[number], number)

    def encode_text(self, text_ids, attention_mask, word_mask):
        number = self.first[text_ids[:, 0]] + text_ids[:, 1]
        return StubFeatures(self.text[number], number)


class StubTexts(NamedTuple):
    number: torch.Tensor

    def select(self, rows, tokens):
        assert tokens == 2
        return StubTexts(self.number[rows])

    @staticmethod
    def stack(parts):
        return StubTexts(torch.cat([part.number for part in parts]))


class StubITMScorer:
    reads_padding = False

    def __init__(self, model):
        self.model = model

    def prepare_texts(self, text):
        return StubTexts(text.number)

    def prepare_image(self, image):
        (number,) = image.number.tolist()
        return number

    def match(self, image, texts):
        self.model.calls.append(len(texts.number))
        return self.model.scores[image, texts.number]


class Stub(NamedTuple):
    model: StubModel

    def text(self, captions):
        ids = torch.tensor([[int(part) for part in caption.split()] for caption in captions])
        return TextTokens(ids, ids >= 0, ids >= 0)

    def preprocess(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


def make_stub(captions, levels=0):
    """Random unit features; with `levels`, coarse ones in which scores often tie."""
    generator = torch.Generator().manual_seed(7)
    texts = sum(captions)
    owner = torch.repeat_interleave(torch.arange(len(captions)), torch.tensor(captions))
    image = torch.randn(len(captions), 4, generator=generator)
    text = image[owner] + 1.2 * torch.randn(texts, 4, generator=generator)
    match = torch.randn(len(captions), texts, generator=generator)
    if levels:
        image, text = (torch.round(part * levels) / levels for part in (image, text))
        match = torch.round(match * levels) / levels
    else:
        image, text = (torch.nn.functional.normalize(part, dim=-1) for part in (image, text))
    first = np.cumsum([0, *captions[:-1]])
    return Stub(StubModel(image, text, match, first))
