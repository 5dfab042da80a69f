"""The MLP of the Fourier encoder against its two lines of arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from vlp.positions.modulator import Modulator


def gelu(value, approximate):
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
        return 0.5 * value * (1 + math.tanh(inner))
    return 0.5 * value * (1 + math.erf(value / math.sqrt(2)))


def layer_norm(row):
    mean = sum(row) / len(row)
    variance = sum((value - mean) ** 2 for value in row) / len(row)
    return [(value - mean) / math.sqrt(variance + 1e-5) for value in row]


def dense(row, layer):
    return [
        sum(w * value for w, value in zip(weights, row)) + bias
        for weights, bias in zip(layer.weight.tolist(), layer.bias.tolist())
    ]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("norm", [True, False])
def test_equation_6(norm, approximate):
    mlp = Modulator(4, 3, 5, approximate, norm=norm).double()
    features = torch.randn(2, 3, 4).double()
    out = mlp(features)
    for image in range(2):
        for token in range(3):
            row = features[image, token].tolist()
            row = dense(layer_norm(row) if norm else row, mlp.dense_in)
            row = [gelu(value, approximate) for value in row]
            row = dense(layer_norm(row) if norm else row, mlp.dense_out)
            expected = torch.tensor(row, dtype=torch.float64)
            torch.testing.assert_close(out[image, token], expected, rtol=0, atol=1e-12)


def test_both_gelus_differ_by_less_than_a_thousandth():
    """papers.md#fourier-f5."""
    exact, tanh = Modulator(4, 8, 1).double(), Modulator(4, 8, 1, "tanh").double()
    tanh.load_state_dict(exact.state_dict())
    features = torch.randn(200, 4).double()
    gap = (exact(features) - tanh(features)).abs().max().item()
    assert 0 < gap < 1e-3


def test_dropout_stands_after_the_activation_and_only_in_training():
    mlp = Modulator(4, 400, 1, dropout=0.5).double()
    hidden = []
    mlp.dense_out.register_forward_hook(lambda layer, inputs, out: hidden.append(inputs[0]))
    features = torch.randn(4).double()
    mlp(features)
    assert 0.3 < hidden[0].eq(0).double().mean() < 0.7
    mlp.eval()
    mlp(features)
    assert not hidden[1].eq(0).any()
    plain = Modulator(4, 400, 1)
    assert not any(isinstance(layer, torch.nn.Dropout) for layer in plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "4, 0 and 5 channels"),
        ({"approximate": "sigmoid"}, "GELU 'sigmoid'; one of none, tanh"),
        ({"dropout": 1.0}, "dropout .* not 1.0"),
        ({"dropout": -0.1}, "dropout .* not -0.1"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Modulator(**{"inputs": 4, "hidden": 3, "outputs": 5} | options)
