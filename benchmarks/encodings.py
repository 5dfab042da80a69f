"""Speed and memory of a vision transformer with each position encoding, relative to timm's."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness
from benchmarks.harness import Figure
from vlp.config import ConfigError
from vlp.positions import PositionContext, PositionEncoding, attach

MODEL = "deit_small_patch16_224"
PARTS = ("training", "inference")


IRPE = ("k", "qk", "qkv")
OTHERS = (
    "alibi-2d",
    "rope-axial",
    "rope-mixed",
    "sine-2d",
    "fourier",
    "huang",
    "sasa",
    "transformer-xl",
    "cope",
)


class EncodingVariant(NamedTuple):
    """An encoding (name or class; None: no encoding) and its options."""

    name: str | Callable[..., PositionEncoding] | None
    options: dict[str, Any]


VARIANTS = {
    "plain": EncodingVariant(None, {}),
    "sdpa": EncodingVariant(None, {}),
    "irpe-product bias": EncodingVariant("irpe-product", {"mode": "bias", "on": "k"}),
    **{f"irpe-product {on}": EncodingVariant("irpe-product", {"on": on}) for on in IRPE},
    "shaw": EncodingVariant("shaw", {"on": "k"}),
    "sape": EncodingVariant("sape", {"on": "k"}),
    **{name: EncodingVariant(name, {}) for name in OTHERS},
}


class PublishedIRPE(PositionEncoding):
    """The published iRPE code (`module`: its `irpe.py`) in this project's hooks."""

    def __init__(self, width: int, heads: int, module: Any, on: str) -> None:
        super().__init__()
        config = module.get_rpe_config(
            ratio=1.9, method="product", mode="ctx", shared_head=True, skip=1, rpe_on=on
        )
        self.on, self.scale = on, (width // heads) ** -0.5
        self.query, self.key, self.value_table = module.build_rpe(config, width // heads, heads)

    @property
    def hooks(self) -> frozenset[str]:
        """Return the hooks of the letters q, k and v."""
        return frozenset({"value" if letter == "v" else "bias" for letter in self.on})

    def bias(self, query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
        """Return the terms of the logits, of queries (B, heads, T, channels) already scaled."""
        terms = None
        if self.key is not None:
            terms = self.key(query * self.scale)
        if self.query is not None:
            key_terms = self.query(key * self.scale).transpose(2, 3)
            terms = key_terms if terms is None else terms + key_terms
        return terms

    def value(self, attention: Tensor, context: PositionContext) -> Tensor:
        """Return the term of the output, of attention weights (B, heads, T, T)."""
        added: Tensor = self.value_table(attention)
        return added


def published_variants(file: Path) -> dict[str, EncodingVariant]:
    """Return variants of the published iRPE code from its file `irpe.py`."""
    # Its only dependency beyond PyTorch, a dictionary with attributes.
    sys.modules.setdefault("easydict", _easydict())
    specification = importlib.util.spec_from_file_location("irpe", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return {
        f"published {on}": EncodingVariant(partial(PublishedIRPE, module=module, on=on), {})
        for on in IRPE
    }


def _easydict() -> ModuleType:
    class EasyDict(dict[str, Any]):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    module = ModuleType("easydict")
    module.EasyDict = EasyDict  # type: ignore[attr-defined]
    return module


class VariantTimes(NamedTuple):
    """MACs of an image, parameters, peak bytes, and seconds of each round by part."""

    macs: float
    parameters: int
    peak: int
    seconds: dict[str, list[float]]


def build_model(name: str, size: int, device: torch.device) -> nn.Module:
    """Build a variant; tables are random, as they would not be zero after training."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(MODEL, img_size=size)
    variant = VARIANTS[name]
    if variant.name is not None:
        attach(model, variant.name, **variant.options)
        for part, parameter in model.named_parameters():
            if "positions" in part:
                nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = name == "sdpa" or device.type != "cpu"  # type: ignore[assignment]
    return model.to(device)


class _Runner:
    """A variant that trains and runs on random images."""

    def __init__(self, name: str, size: int, rows: int, device: torch.device) -> None:
        self.device = device
        self.model = build_model(name, size, device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.pixels = torch.randn(rows, 3, size, size, device=device)

    def step(self, training: bool) -> None:
        """Do one training step, or one forward pass."""
        self.model.train(training)
        with torch.set_grad_enabled(training), torch.autocast(self.device.type, torch.bfloat16):
            out = self.model(self.pixels)
        if training:
            out.float().square().mean().backward()
            self.optimiser.step()
            self.optimiser.zero_grad()

    def turn(self) -> dict[str, float]:
        """Measure both parts, in seconds."""
        return {
            part: harness.seconds(partial(self.step, part == "training"), self.device)
            for part in PARTS
        }


def macs(name: str, size: int) -> float:
    """Count the multiply-accumulates of one image's forward pass."""
    model = build_model(name, size, torch.device("cpu")).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            # The counter misses the products of the CPU's fused attention.
            module.fused_attn = False  # type: ignore[assignment]
        if getattr(module, "fused", None) is not None:
            module.fused = False  # type: ignore[assignment]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, size, size))
    return counter.get_total_flops() / 2


def measure(
    names: Sequence[str], size: int, rows: int, rounds: int, device: torch.device
) -> dict[str, VariantTimes]:
    """Measure `plain` and the variants `names` at one image size, by turns.

    rows: images of a batch; rounds: timed steps of each variant.
    """
    names = list(dict.fromkeys(["plain", *names]))
    peaks, runners = {}, {}
    for name in names:
        # Garbage of an earlier model would be freed, and counted, during this measurement.
        gc.collect()
        peaks[name] = harness.peak_memory(partial(_two_steps, name, size, rows, device), device)
    for name in names:
        runners[name] = _Runner(name, size, rows, device)
    turns = harness.interleave({name: runners[name].turn for name in names}, rounds, 1)
    return {
        name: VariantTimes(
            macs(name, size),
            sum(parameter.numel() for parameter in runners[name].model.parameters()),
            peaks[name],
            {part: [turn[part] for turn in turns[name]] for part in PARTS},
        )
        for name in names
    }


def _two_steps(name: str, size: int, rows: int, device: torch.device) -> None:
    runner = _Runner(name, size, rows, device)
    for _ in range(2):
        runner.step(training=True)


def ratio(times: dict[str, VariantTimes], name: str, part: str) -> float:
    """Return the throughput of a variant relative to `plain`, the median over rounds."""
    pairs = zip(times["plain"].seconds[part], times[name].seconds[part])
    return statistics.median(plain / variant for plain, variant in pairs)


def table(times: dict[str, VariantTimes], rows: int) -> str:
    """Format a table with a row per variant."""
    head = ["", "parameters", "MACs (M)", "train img/s", "of plain", "infer img/s", "of plain"]
    lines = []
    for name, variant in times.items():
        line = [name, f"{variant.parameters / 1e6:.2f}M", f"{variant.macs / 1e6:.0f}"]
        for part, seconds in variant.seconds.items():
            line += [f"{rows / statistics.median(seconds):.1f}", f"{ratio(times, name, part):.1%}"]
        lines.append([*line, f"{variant.peak / 2**20:.0f}"])
    return harness.table([*head, "peak MiB"], lines)


def encodings(
    sizes: str = "224",
    rows: int | None = None,
    rounds: int = 7,
    only: str = "",
    published: Path | None = None,
    device: harness.Device = None,
) -> None:
    """Time DeiT-S with each position encoding, in bf16, as a share of the plain model's speed.

    --sizes: pixels, such as 224,384. --rows: images of a batch, by default 4 on a CPU and 64 on a
    GPU. --only: variants, such as plain,cope. "plain" is DeiT-S with only its learned absolute
    positions, with fused attention on a GPU and explicit attention on a CPU, where it trains faster
    ("sdpa": fused). Ratios are medians over rounds in which variants take turns. MACs are
    multiply-accumulates of one image in matrix products and convolutions. --published FILE also
    times the published iRPE code: its module `irpe.py` (repository microsoft/Cream, folder
    iRPE/DeiT-with-iRPE).
    """
    if published is not None:
        try:
            VARIANTS.update(published_variants(published))
        except OSError as error:
            raise ConfigError(str(error)) from error
    torch_device = harness.select_device(device)
    on_gpu = torch_device.type == "cuda"
    rows = rows or (64 if on_gpu else 4)
    available = list(VARIANTS)
    names = only.split(",") if only else available
    if unknown := sorted(set(names) - set(available)):
        raise ConfigError(
            f"unknown variants {', '.join(unknown)}; there are {', '.join(available)}"
        )
    for size in map(int, sizes.split(",")):
        times = measure(names, size, rows, rounds, torch_device)
        print(f"DeiT-S, {size} px, {rows} images, bf16\n{table(times, rows)}\n", flush=True)
        figures = [
            Figure(f"encodings/{size}/{name}/{part}", 100 * ratio(times, name, part), "%")
            for name in list(times)[1:]
            for part in PARTS
        ]
        harness.print_figures(figures, torch_device)


COMMANDS = (encodings,)
