import pytest
import torch
from tests_support import ace, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import (
    Shape,
    base_parts,
    compare,
    our_anchor_parts,
    parameters,
    token_projections,
)
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel

GRID, TOKENS = (4, 4), 12


def run(model, pairs):
    """FLOPs per pair that PyTorch counts: text, image, paths, cross-modal encoder."""
    pixels, ids = torch.rand(pairs, 3, 16, 16), torch.randint(5, 40, (pairs, TOKENS))
    mask = torch.ones(pairs, TOKENS, dtype=torch.bool)
    counts = []

    def counted(part):
        with FlopCounterMode(display=False) as counter:
            result = part()
        counts.append(counter.get_total_flops() / pairs)
        return result

    text = counted(lambda: model.encode_text(ids, mask, mask))
    image = counted(lambda: model.encode_image(pixels))
    anchors = counted(lambda: model.anchor_paths(image, text))
    counted(lambda: model.cross_encoder(text.states, image.states, mask, anchors))
    return counts


CROSS = [
    {"position": ()},
    {},
    {"layout": "text"},
    {"layout": "albef"},
    ace(groups=4, roles=("query",)),
    ace(groups=2, roles=("key", "value"), shared_heads=True),
    ace(groups=2, features="encoder"),
    ace(groups=2, mode="bias"),
    ace(groups=2, mode="bias", shared_heads=True) | {"layout": "text"},
]


@pytest.mark.parametrize("pairs", [1, 8])
@pytest.mark.parametrize("cross", CROSS)
def test_products_are_those_that_run(cross, pairs):
    config = tiny_config(cross=cross)
    shape = Shape(TOKENS, GRID, pairs)
    text, image, encoder = base_parts(config, shape)
    similarity, *rest = our_anchor_parts(config, shape) if config.cross.position else [None]
    with torch.no_grad():
        counts = run(VLPModel(config), pairs)
    side = 2 * config.text.width * config.embed_dim
    assert counts[0] == text.layers + text.products + TOKENS * side
    assert counts[1] == image.layers + image.products + 16 * side
    assert token_projections(config, shape).total == (TOKENS + 16) * side
    assert counts[2] == (similarity.layers + similarity.products if similarity else 0)
    assert counts[3] == encoder.layers + encoder.products + sum(
        part.layers + part.products for part in rest
    )


@pytest.mark.parametrize(
    ("size", "tokens", "layers", "every"),
    [
        (384, 25, (115.7, 122.4, 5.8), (128.6, 135.2, 5.2)),
        (384, 30, (116.7, 124.7, 6.9), (129.6, 137.6, 6.2)),
        (256, 30, None, (57.9, 61.5, 6.2)),
    ],
)
def test_the_papers_convention_gives_the_figures_of_the_readings(size, tokens, layers, every):
    rows = compare(ModelConfig(), Shape(tokens, (size // 16, size // 16)))
    for row, expected in zip(rows, (layers, every)):
        if expected:
            assert row[1:3] == pytest.approx(expected[:2], abs=0.06)
            assert row.added == pytest.approx(expected[2], abs=0.07)


def test_parameters_are_the_papers():
    counts = parameters(ModelConfig())
    assert list(counts.values())[:4] == [66_561_280, 43_760_128, 53_277_696, 163_599_104]
    assert counts["of these, tables of ACE-RPE"] == 6 * 3 * 8 * 768
    assert counts["beside them, token projections"] == 2 * 196_608
