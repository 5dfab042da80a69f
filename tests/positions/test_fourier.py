import math

import pytest
import torch
from sinusoids_by_hand import added
from torch.nn import functional

from vlp.positions import PositionContext
from vlp.positions.fourier import FourierPosition, MLPPosition, fourier_features, kl_regulariser
from vlp.positions.modulator import Modulator


def slow_features(coords, weight):
    size = 2 * len(weight)
    angles = [sum(w * x for w, x in zip(row, coords)) for row in weight]
    waves = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    return torch.tensor(waves, dtype=torch.float64) / math.sqrt(size)


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_equation_2(dimensions):
    coords, weight = torch.randn(2, 3, dimensions).double(), torch.randn(5, dimensions).double()
    features = fourier_features(coords, weight)
    assert features.shape == (2, 3, 10)
    for i in range(2):
        for j in range(3):
            expected = slow_features(coords[i, j].tolist(), weight.tolist())
            torch.testing.assert_close(features[i, j], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(features.square().sum(-1), torch.full((2, 3), 0.5).double())


@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_the_start_approximates_the_gaussian_kernel(gamma):
    """Eq. 5 (papers.md#fourier-f1 to #fourier-f3); std = gamma^-2 would miss by far at both."""
    torch.manual_seed(0)
    encoding = FourierPosition(40_000, gamma=gamma, mlp=False).double()
    spread = encoding.frequencies.std().item()
    assert spread == pytest.approx(1 / gamma, rel=0.02)
    coords = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [1.0, 2.0]]).double() * gamma
    features = fourier_features(coords, encoding.frequencies)
    distance = torch.cdist(coords, coords)
    expected = (-distance.square() / (2 * gamma**2)).exp() / 2
    torch.testing.assert_close(features @ features.T, expected, rtol=0, atol=0.01)


def test_uniform_start():
    torch.manual_seed(0)
    weight = FourierPosition(4000, gamma=7.0, mlp=False, initialisation="uniform").frequencies
    assert 0 <= weight.min().item() < 0.01 < 0.99 < weight.max().item() <= 1


def test_feature_gradients_and_kinds():
    coords, weight = torch.randn(3, 2).double(), torch.randn(4, 2).double()
    inputs = (coords.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(fourier_features, inputs)
    zero = torch.zeros(1, 2, requires_grad=True)
    fourier_features(zero, torch.zeros(4, 2)).sum().backward()
    assert torch.equal(zero.grad, torch.zeros(1, 2))
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        assert fourier_features(coords.to(kind), weight.to(kind)).dtype == kind
    assert fourier_features(torch.ones(3, 2).long(), weight.float()).dtype == torch.float32


def test_angles_are_exact_in_half_precision_and_under_autocast():
    """bfloat16 angles of 200 patches are off by half a radian."""
    coords, weight = torch.tensor([[200.0, 131.0]]), torch.randn(4, 2).bfloat16().float()
    exact = fourier_features(coords.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fourier_features(coords, weight)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    half = fourier_features(coords.bfloat16(), weight.bfloat16())
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=0.002)


def test_a_weight_of_other_coordinates_is_an_error():
    for shape in ((4, 3), (0, 2), (2,)):
        with pytest.raises(ValueError, match=r"\(features / 2, 2\) belongs to"):
            fourier_features(torch.zeros(1, 2), torch.zeros(shape))


def normal_divergence(mean, variance, target, points=200_001, reach=60.0):
    """KL(N(mean, variance) || N(0, target)) by the trapezoid rule on its integral."""
    x = torch.linspace(-reach, reach, points, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    density = torch.distributions.Normal(zero + mean, variance**0.5).log_prob(x)
    other = torch.distributions.Normal(zero, target**0.5).log_prob(x)
    return torch.trapezoid(density.exp() * (density - other), x).item()


@pytest.mark.parametrize("target", [0.5, 1.0, 4.0])
def test_the_regulariser_is_the_divergence_of_both_normals(target):
    weight = torch.randn(6, 2).double() * 1.5 + 0.3
    log_target = torch.tensor(math.log(target), dtype=torch.float64)
    pooled, *columns = (
        normal_divergence(x.mean().item(), x.var(correction=0).item(), target)
        for x in (weight, *weight.T)
    )
    assert kl_regulariser(weight, log_target).item() == pytest.approx(pooled, abs=1e-9)
    by_column = kl_regulariser(weight, log_target, per_dim=True)
    assert by_column.item() == pytest.approx(sum(columns) / 2, abs=1e-9)


def test_regulariser_gradients():
    weight, log_variance = torch.randn(5, 2).double(), torch.randn(()).double()
    inputs = (weight.requires_grad_(), log_variance.requires_grad_())
    for per_dim in (False, True):
        assert torch.autograd.gradcheck(lambda *x, p=per_dim: kl_regulariser(*x, p), inputs)
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        equal = torch.full((5, 2), 0.5, dtype=kind, requires_grad=True)
        log_variance = torch.zeros((), dtype=kind, requires_grad=True)
        loss = kl_regulariser(equal, log_variance)
        assert loss.dtype == kind
        loss.backward()
        assert loss.isfinite()
        assert equal.grad.isfinite().all()
        assert log_variance.grad.isfinite()
    with pytest.raises(ValueError, match=r"\(1, 2\) has no spread"):
        kl_regulariser(torch.zeros(1, 2), torch.zeros(()), per_dim=True)


def test_the_regulariser_of_the_module():
    encoding = FourierPosition(16, gamma=4.0, regularised=True)
    assert encoding.log_variance.exp().item() == pytest.approx(1 / 16)
    plain = encoding.regulariser()
    torch.testing.assert_close(encoding("regulariser", 3.0), 3 * plain)
    per_dim = kl_regulariser(encoding.frequencies, encoding.log_variance, per_dim=True)
    assert torch.equal(encoding.regulariser(per_dim=True), per_dim)
    with torch.no_grad():
        encoding.frequencies.mul_(3).add_(0.2)
    before = encoding.regulariser()
    before.backward()
    for parameter in (encoding.frequencies, encoding.log_variance):
        assert parameter.grad.abs().max() > 0
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-3)
    assert encoding.regulariser() < before
    with pytest.raises(ValueError, match="needs the option regularised=True"):
        FourierPosition(16).regulariser()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_algorithm_1_on_boxes(groups):
    encoding = FourierPosition(
        16, dimensions=4, groups=groups, features=6, hidden=5, gamma=0.3, extent=1.0
    ).double()
    assert encoding.frequencies.shape == (3, 4 // groups)
    boxes = torch.rand(2, 5, 4).double()
    out = added(encoding, PositionContext(prefix_tokens=1, coordinates=boxes), 6, batch=2)
    assert not out[:, 0].any()
    for image in range(2):
        for token in range(5):
            parts = []
            for group in boxes[image, token].chunk(groups):
                features = slow_features(group.tolist(), encoding.frequencies.tolist())
                parts.append(encoding.modulator(features))
            expected = torch.cat(parts)
            torch.testing.assert_close(out[image, 1 + token], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("groups", "projection"), [(1, False), (2, False), (1, True)])
def test_without_an_mlp_the_features_are_the_position(groups, projection):
    sizes = {"features": 6} if projection else {}
    encoding = FourierPosition(8, groups=groups, mlp=False, projection=projection, **sizes).double()
    out = added(encoding, PositionContext((2, 3)), 6)
    for row in range(2):
        for column in range(3):
            parts = [
                slow_features(group, encoding.frequencies.tolist())
                for group in ([[column, row]] if groups == 1 else [[column], [row]])
            ]
            expected = encoding.modulator(parts[0]) if projection else torch.cat(parts)
            torch.testing.assert_close(out[0, row * 3 + column], expected)


def test_fixed_features_are_kept_but_not_learned():
    encoding = FourierPosition(8, learnable=False)
    assert "frequencies" not in dict(encoding.named_parameters())
    other = FourierPosition(8, learnable=False)
    other.load_state_dict(encoding.state_dict())
    assert torch.equal(other.frequencies, encoding.frequencies)
    learnable = FourierPosition(8)
    learnable.load_state_dict(encoding.state_dict())
    added(learnable.double(), PositionContext((2, 3)), 6).square().sum().backward()
    assert learnable.frequencies.grad.abs().sum() > 0


def test_the_mlp_alone():
    encoding = MLPPosition(8, hidden=5).double()
    out = added(encoding, PositionContext((2, 3), 1), 7)
    assert not out[:, 0].any()
    for row in range(2):
        for column in range(3):
            share = torch.tensor([(column + 0.5) / 3, (row + 0.5) / 2], dtype=torch.float64)
            expected = encoding.modulator(share)
            torch.testing.assert_close(out[0, 1 + row * 3 + column], expected, rtol=0, atol=1e-12)
    in_patches = MLPPosition(8, extent=None).double()
    out = added(in_patches, PositionContext((2, 3)), 6)
    torch.testing.assert_close(out[0, 5], in_patches.modulator(torch.tensor([2.0, 1.0]).double()))
    boxes = torch.rand(2, 3, 4).double()
    encoding = MLPPosition(8, dimensions=4).double()
    out = added(encoding, PositionContext(coordinates=boxes), 3, batch=2)
    torch.testing.assert_close(out, encoding.modulator(boxes))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("norm", [True, False])
def test_equation_6(norm, approximate):
    mlp = Modulator(4, 3, 5, approximate, norm=norm).double()
    features = torch.randn(2, 3, 4).double()

    def dense(x, layer):
        x = functional.layer_norm(x, x.shape[-1:]) if norm else x
        return x @ layer.weight.T + layer.bias

    hidden = functional.gelu(dense(features, mlp.dense_in), approximate=approximate)
    torch.testing.assert_close(mlp(features), dense(hidden, mlp.dense_out), rtol=0, atol=1e-12)


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
