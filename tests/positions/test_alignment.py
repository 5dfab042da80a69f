"""The bias that leads words to the patches they resemble, against loops over its sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_position
from vlp.positions.anchor_field import PathSettings, anchor_field, joined_fields

HEADS, GROUPS, GRID = 2, 2, (2, 3)
WORDS = torch.tensor([[False, True, True, True, False]] * 2 + [[False, True] + [False] * 3])


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(3, n, 4, generator=generator, dtype=torch.float64) for n in (6, 5))


def field_of(image, text):
    return anchor_field(image, text, WORDS, PathSettings(GRID, 0.05, GROUPS))


def of(factors):
    position = create_position("alignment", heads=HEADS).double()
    with torch.no_grad():
        position.factors.copy_(torch.tensor(factors))
    return position


@pytest.mark.parametrize("text_queries", [True, False])
def test_every_logit_gets_the_mean_cosine_of_its_word_and_its_patch(text_queries):
    image, text = tokens()
    context = PositionContext(anchors=field_of(image, text), text_queries=text_queries)
    bias = of([0.5, -2.0]).bias(image, text, context)
    assert bias.shape == ((3, HEADS, 5, 7) if text_queries else (3, HEADS, 7, 5))
    expected = torch.zeros_like(bias if text_queries else bias.mT)
    for pair in range(3):
        for word in WORDS[pair].nonzero().flatten():
            for patch in range(6):
                halves = zip(text[pair, word].chunk(GROUPS), image[pair, patch].chunk(GROUPS))
                cosine = sum(cosine_similarity(a, b, dim=0) for a, b in halves) / GROUPS
                for head, factor in enumerate((0.5, -2.0)):
                    expected[pair, head, word, 1 + patch] = 10 * factor * cosine
    torch.testing.assert_close(bias if text_queries else bias.mT, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text_queries", [True, False])
def test_from_zero_factors_a_layer_is_what_it_was_and_learns_them(text_queries):
    torch.manual_seed(0)
    image, text = tokens()
    context = PositionContext(anchors=field_of(image, text), text_queries=text_queries)
    position = create_position("alignment", heads=HEADS, start=0).double()
    layer = Attention(4, HEADS, output=False, positions=[position]).double()
    plain = Attention(4, HEADS, output=False).double()
    plain.load_state_dict(layer.state_dict(), strict=False)
    states, others = torch.randn(3, 5, 4).double(), torch.randn(3, 7, 4).double()
    asked = (states, others, None, context) if text_queries else (others, states, None, context)
    out = layer(*asked)
    assert torch.equal(out, plain(*asked))
    out.square().sum().backward()
    assert (position.factors.grad != 0).all()


def test_every_second_head_starts_with_the_factor_that_is_asked_for():
    position = create_position("alignment", heads=5, start=1.5)
    assert position.factors.tolist() == [1.5, 0, 1.5, 0, 1.5]


def test_of_several_images_each_has_its_own():
    (image, text), (other, _) = tokens(), tokens(1)
    both = joined_fields([field_of(image, text), field_of(other, text)])
    position = of([1.0, 2.0])

    def bias(field):
        return position.bias(text, image, PositionContext(anchors=field))

    expected = [bias(field_of(each, text)) for each in (image, other)]
    torch.testing.assert_close(bias(both), torch.cat(expected, dim=-1))


def test_without_similarities_it_says_what_it_is_for():
    image, text = tokens()
    with pytest.raises(ValueError, match="alignment needs similarities in its context"):
        of([1.0, 1.0]).bias(text, image, PositionContext())
