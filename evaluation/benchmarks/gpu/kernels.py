"""Part B: kernels of ACE-RPE and FlexAttention beside PyTorch's own operations.

On a CPU, in a dry run, no kernel runs: both sides are PyTorch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from vlp.layers.attention import Attention, attend
from vlp.positions import PositionContext, create_position
from vlp.positions.anchor import anchor_distance, anchor_path
from vlp.positions.anchor_field import AnchorField, with_prefix

TOLERANCE = 1e-4
"""Error of a float32 tensor, as a share of its largest value where that is above 1."""
USUAL = 2.0
"""Error of bf16 tensors, in errors of the explicit path in bf16."""


def kernels(setting: Setting) -> Iterator[CheckedFigure]:
    """Compare each kernel with PyTorch's operations, and a second run of it with the first."""
    if setting.device.type == "cpu":
        print("no kernel runs on a CPU: PyTorch's operations take their place")
    yield from _paths(setting.device)
    yield from _anchored(setting)
    yield from _flex(setting)


def _paths(device: torch.device) -> Iterator[CheckedFigure]:
    grid, words = (4, 5), 7
    generator = torch.Generator().manual_seed(0)
    similarity = 2 * torch.rand(3, 20, words, 2, generator=generator) - 1
    mask = torch.arange(words).expand(3, -1) < torch.tensor([[7], [4], [0]])

    def paths(place: torch.device, kernel: bool) -> dict[str, Tensor]:
        given = similarity.to(place).requires_grad_()
        path, _ = anchor_path(anchor_distance(given, 0.5), grid, mask.to(place), kernel=kernel)
        path.square().sum().backward()
        assert given.grad is not None
        return {"path": path.detach(), "gradient": given.grad}

    ours, again, plain = paths(device, True), paths(device, True), paths(device, False)
    host = paths(torch.device("cpu"), False)
    yield _repeatable("paths", ours, again)
    for name, other in (("PyTorch's", plain), ("a CPU's", host)):
        error = max(float((ours[key].cpu() - other[key].cpu()).abs().max()) for key in ours)
        yield CheckedFigure(f"paths: from {name}", error, "", at_most=1e-5, correctness=True)


def _anchored(setting: Setting) -> Iterator[CheckedFigure]:
    """Compare the attention of ACE-RPE, of the sizes of the base model and with padding."""
    sizes = ((2, 3), 5, 2, 4, 3, 2) if setting.dry else ((16, 16), 30, 12, 64, 8, 4)
    torch.manual_seed(0)
    for mode in ("contextual", "bias"):
        layer, field = layer_and_field(*sizes, mode=mode)
        for side in ("text", "image"):
            run = partial(_attended, layer, field, mode, side)
            exact = run(False, torch.device("cpu"), torch.float32)
            name = f"attention, {mode}, {side} asks"
            ours, again = (run(True, setting.device, torch.float32) for _ in range(2))
            yield _repeatable(f"{name}, float32", ours, again)
            yield _near(f"{name}, float32: from the explicit path", ours, exact, TOLERANCE)
            ours, again = (run(True, setting.device, torch.bfloat16) for _ in range(2))
            yield _repeatable(f"{name}, bf16", ours, again)
            explicit = run(False, setting.device, torch.bfloat16)
            yield _no_worse(f"{name}, bf16: error, in the explicit path's", ours, explicit, exact)


def _attended(
    layer: Attention,
    field: AnchorField,
    mode: str,
    side: str,
    kernel: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Run a copy of a layer; paths have gradients, and means where the mode reads them."""
    learned = ["text_path" if side == "text" else "path"]
    learned += ["text_mean", "image_mean"] if mode == "contextual" else []
    moved = {
        name: x.to(device, dtype, copy=True).requires_grad_(name in learned)
        for name, x in field._asdict().items()
    }
    here = copy.deepcopy(layer).to(device, dtype)
    return outputs_and_gradients(here, AnchorField(**moved), kernel, side == "text")


def layer_and_field(
    grid: tuple[int, int] = (2, 3),
    words: int = 5,
    heads: int = 2,
    channels: int = 4,
    groups: int = 3,
    rows: int = 2,
    **options: Any,
) -> tuple[Attention, AnchorField]:
    """Make an attention whose tables are not zero, and paths that need not be consistent.

    Args:
        grid: of patches.
        words: of a text, of which some are padding.
        heads: attention heads.
        channels: of a head.
        groups: of anchors.
        rows: pairs.
        options: of position encoding `anchor`.
    """
    width = heads * channels
    position = create_position("anchor", width=width, heads=heads, groups=groups, **options)
    for parameter in position.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = Attention(width, heads, output=False, positions=[position])
    real = torch.rand(rows, words) < 0.7
    path = torch.rand(rows, grid[0] * grid[1], words, groups)
    path = torch.where((path < 0.6) & real[:, None, :, None], 1 + 5 * path, 0.0)
    return layer, with_prefix(path, path, real)


def outputs_and_gradients(
    layer: Attention,
    field: AnchorField,
    kernel: bool,
    text_queries: bool = True,
    wrap: Callable[[Attention], Callable[..., Tensor]] = lambda layer: layer,
) -> dict[str, Tensor]:
    """Run a layer where its weights are; the last row of a masked text is all padding.

    Args:
        layer: of `layer_and_field`.
        field: its paths; those that require a gradient must be read in this direction.
        kernel: False keeps to the explicit path on a GPU, too.
        text_queries: text asks and image answers, else the other way, with padded keys.
        wrap: what compiles the layer, if anything.

    Returns:
        The output, `out`, and gradients by name of states, parameters and paths.
    """
    layer.zero_grad()
    layer.fused = None if kernel else False
    generator = torch.Generator().manual_seed(7)
    rows, patches, words, _ = field.path.shape
    text, image = (
        torch.randn(rows, tokens, layer.query.in_features, generator=generator)
        .to(layer.query.weight)
        .requires_grad_()
        for tokens in (words, patches)
    )
    mask = torch.rand(rows, words, generator=generator) < 0.6
    mask[-1] = False
    states, other = (text, image) if text_queries else (image, text)
    context = PositionContext(anchors=field, text_queries=text_queries)
    out = wrap(layer)(states, other, None if text_queries else mask.to(text.device), context)
    weight = torch.randn(out.shape, generator=generator).to(out)
    leaves = {"text": text, "image": image} | dict(layer.named_parameters())
    del leaves["key.bias"]  # weights do not depend on it: its gradient is rounding alone
    leaves |= {name: x for name, x in field._asdict().items() if x.is_leaf and x.requires_grad}
    gradients = torch.autograd.grad((out * weight).sum(), [*leaves.values()])
    return {"out": out.detach()} | dict(zip(leaves, gradients))


def _flex(setting: Setting) -> Iterator[CheckedFigure]:
    """Compare iRPE's tables inside FlexAttention with the dense bias."""
    heads, channels, grid, rows = (2, 16, (3, 4), 2) if setting.dry else (6, 64, (14, 14), 4)
    width, tokens = heads * channels, 1 + grid[0] * grid[1]
    torch.manual_seed(0)
    position = create_position("irpe-product", width=width, heads=heads, roles=["query", "key"])
    for parameter in position.parameters():
        nn.init.normal_(parameter, std=0.3)
    position.to(setting.device)
    states = [torch.randn(rows, heads, tokens, channels).to(setting.device) for _ in range(3)]
    leaves: dict[str, Tensor] = dict(position.named_parameters())
    if setting.device.type == "cuda":  # on a CPU FlexAttention has none of these gradients
        leaves |= {name: x.requires_grad_() for name, x in zip(("query", "key", "value"), states)}
    weight = torch.randn(states[0].shape).to(setting.device)

    def run(fused: Literal["flex", False]) -> dict[str, Tensor]:
        query, key, value = states
        out = attend(query, key, value, [position], PositionContext(grid, 1), fused=fused)
        gradients = torch.autograd.grad((out * weight).sum(), [*leaves.values()])
        return {"out": out.detach()} | dict(zip(leaves, gradients))

    name = "FlexAttention, irpe-product: from the dense bias"
    yield _near(name, run("flex"), run(False), 1e-3)


def _repeatable(name: str, first: dict[str, Tensor], second: dict[str, Tensor]) -> CheckedFigure:
    same = all(torch.equal(x, second[key]) for key, x in first.items())
    return CheckedFigure(
        f"{name}: repeatable bit by bit", float(same), "", at_least=1, correctness=True
    )


def _near(
    name: str, found: dict[str, Tensor], expected: dict[str, Tensor], most: float
) -> CheckedFigure:
    """Return the largest error of any tensor, as a share of its largest value above 1."""
    assert found.keys() == expected.keys()
    errors = []
    for key, wanted in expected.items():
        error = (found[key].cpu().float() - wanted.cpu()).abs().max()
        errors.append(error / wanted.cpu().abs().max().clamp(min=1))
    worst = float(torch.stack(errors).max())  # NaN where one is
    return CheckedFigure(name, worst, "", at_most=most, correctness=True)


def _no_worse(
    name: str, found: dict[str, Tensor], usual: dict[str, Tensor], exact: dict[str, Tensor]
) -> CheckedFigure:
    """Return the largest ratio of two errors of a tensor, of bf16 both.

    Both hold the rounding of inputs and weights. An error of the explicit path below a quarter of
    bf16's resolution counts as that.
    """
    assert found.keys() == exact.keys()
    ratios = []
    for key, wanted in exact.items():
        error, other = ((x[key].cpu().float() - wanted).norm() for x in (found, usual))
        rounding = torch.finfo(torch.bfloat16).eps * wanted.norm() / 4
        ratios.append(error / torch.maximum(other, rounding))
        print(f"{name}: {key}: {float(error / wanted.norm()):.2g}, {float(ratios[-1]):.2f}")
    worst = float(torch.stack(ratios).max())
    return CheckedFigure(name, worst, "x", at_most=USUAL, correctness=True)
