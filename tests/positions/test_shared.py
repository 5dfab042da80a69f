"""What layers share stays real under tracing, and is a constant of what is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlp.layers.attention import Attention
from vlp.positions import PositionContext, create_fitting_position
from vlp.positions.base import shared

WIDTH, HEADS, GRID = 16, 2, (3, 4)
NAMES = ("irpe-product", "alibi-2d", "shaw", "transformer-xl", "rope-1d", "rope-axial",
         "rope-mixed")  # fmt: skip
every_name = pytest.mark.parametrize("name", NAMES)


class Layer(nn.Module):
    """Attention to an image's features (B, rows, columns, width)."""

    def __init__(self, name, temperature=None):
        super().__init__()
        sizes = {"width": WIDTH, "heads": HEADS, "grid": GRID}
        self.attention = Attention(WIDTH, HEADS, positions=[create_fitting_position(name, sizes)])
        for parameter in self.attention.positions.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        context = PositionContext((x.shape[1], x.shape[2]))
        return self.attention(x.flatten(1, 2), context=context)


def features(rows=GRID[0], columns=GRID[1]):
    return torch.randn(2, rows, columns, WIDTH)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_name
def test_models_train_after_another_was_exported(name):
    x = features(7, 5)  # a grid that nothing has kept so far
    layer = Layer(name).eval()
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))
    other = Layer(name)
    out = other(x)
    assert type(out) is torch.Tensor
    out.square().sum().backward()
    assert other.attention.query.weight.grad.abs().max() > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["irpe-product", "alibi-2d", "transformer-xl", "rope-axial"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_layers_follow_grids_and_number_types(name, dynamic):
    layer, constants = Layer(name), []

    def keep_graph(graph, _):
        constants.append("arange" not in str(graph.graph))
        return graph.forward

    compiled = torch.compile(layer, backend=keep_graph, fullgraph=True, dynamic=dynamic)
    for size in ((3, 4), (4, 3), (5, 5), (3, 4)):
        x = features(*size)
        torch.testing.assert_close(compiled(x), layer(x))
    layer.double()
    x = features().double()
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-10, atol=1e-10)
    compiled(x).sum().backward()
    assert constants
    assert all(constants)


def test_results_are_kept_and_the_latest_win():
    calls = []

    @shared(kept=2)
    def ones(size: int, dtype: torch.dtype) -> torch.Tensor:
        calls.append(size)
        return torch.ones(size, dtype=dtype)

    with torch.inference_mode():
        first = ones(3, torch.float32)
    assert ones(3, torch.float32) is first
    assert not first.is_inference()
    assert ones(3, torch.float64).dtype == torch.float64
    ones(4, torch.float64)
    assert ones(3, torch.float32) is not first
    assert calls == [3, 3, 4, 3]
