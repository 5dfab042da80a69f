"""Training of position encodings in the last blocks of a pretrained ViT; first blocks frozen."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field, PositiveInt
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from evaluation.samples import evenly_spaced
from vlp.config import Config, ConfigError
from vlp.data.image.transforms import Preprocessing
from vlp.data.labelled_images import LabelledImages, draw_subset, open_labelled
from vlp.data.stream.rng import make_rng
from vlp.io import atomic_write
from vlp.models.vision.backbone import BackboneConfig, create_backbone, create_encoding, on_tokens
from vlp.positions import PositionEncoding
from vlp.positions.base import call_method
from vlp.positions.carry_over import carry_over
from vlp.positions.zero_start import zero_start
from vlp.tasks.classification.task import ClassificationConfig
from vlp.training.config import VisionConfig
from vlp.training.optimiser import build_adamw, set_learning_rate

BATCH = 50
# Prefixes of trainable parameters.
TRAINABLE = ("blocks.", "norm.", "fc_norm.", "head.", "positions.")


class FrozenConfig(Config):
    """Frozen blocks of a pretrained ViT, test sizes and learning rate of encodings."""

    blocks: int = Field(ge=1, description="number of leading blocks that stay frozen")
    sizes: tuple[PositiveInt, ...] = Field(
        min_length=1, description="of the test images, in pixels"
    )
    encoding_rate: float = Field(
        1.0, gt=0, description="learning-rate multiplier of encodings, which start at zero"
    )


class Tokens(NamedTuple):
    """Outputs of the frozen blocks and labels."""

    # (images, tokens, width) bfloat16, by `train` or size of the test images.
    by_part: dict[str, Tensor]
    # (images,) of `train` and `test`.
    labels: dict[str, Tensor]
    classes: int


class Tail(nn.Module):
    """The trained blocks of a classifier."""

    def __init__(self, task: ClassificationConfig, blocks: int, classes: int) -> None:
        super().__init__()
        self.config = task.model
        model: Any = create_backbone(task.model, num_classes=classes, img_size=task.data.image_size)
        if len(model.blocks) <= blocks:
            raise ConfigError(
                f"frozen.blocks {blocks}: {task.model.name} has {len(model.blocks)} blocks; leave "
                "at least one to train"
            )
        model.blocks = model.blocks[blocks:]
        zero_start(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(TRAINABLE))
        self.grid: tuple[int, int] = tuple(model.patch_embed.grid_size)
        self.model: Any = model

    def encodings(self) -> dict[str, PositionEncoding]:
        """Return the encodings by their names in this module."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, PositionEncoding)
        }

    def features(self, tokens: Tensor) -> Tensor:
        """Map outputs of the frozen blocks (B, T, width) to outputs of the final norm."""
        x = tokens.float()
        if hasattr(self.model, "context_store"):
            context = self.model.context_store.write(*self.grid)
            for encoding in self.model.positions:
                x = call_method(encoding, PositionEncoding.tokens, x, context)
        normed: Tensor = self.model.norm(self.model.blocks(x))
        return normed

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, classes)."""
        logits: Tensor = self.model.forward_head(self.features(tokens))
        return logits

    def for_grid(self, grid: tuple[int, int]) -> Tail:
        """Return a copy for another grid, with the tables of encodings resampled."""
        other = copy.deepcopy(self)
        other.grid = grid
        width, heads = self.model.embed_dim, self.model.blocks[0].attn.num_heads
        for name, source in self.encodings().items():
            # Encodings on tokens are in a list of the model, others in a list of each attention.
            parent, _, index = name.rpartition(".")
            acts_on_tokens = parent == "model.positions"
            positions = [
                config for config in self.config.positions if on_tokens(config) == acts_on_tokens
            ]
            position = positions[int(index)]
            encoding = create_encoding(position, width=width, heads=heads, grid=grid)
            tables = {part: value.detach() for part, value in source.named_parameters()}
            tables_on_grid = carry_over(position.name, encoding, source, tables, grid, self.grid)
            encoding.load_state_dict({**encoding.state_dict(), **tables_on_grid})
            cast(nn.ModuleList, other.get_submodule(parent))[int(index)] = encoding
        return other


def load_tokens(
    file: Path, config: VisionConfig, frozen: FrozenConfig, limit: int | None
) -> Tokens:
    """Read the outputs of the frozen blocks, or compute and store them if settings changed."""
    task = config.task
    if not isinstance(task, ClassificationConfig):
        raise ConfigError(f"frozen: task.kind is {task.kind}; set it to classification")
    model = task.model.model_copy(update={"positions": ()})
    data = task.data.model_dump(mode="json", exclude={"augment", "workers"})
    precision = config.training.precision
    settings = {"data": data, "limit": limit, "precision": precision}
    settings |= {"model": model.model_dump(mode="json")}
    key = json.dumps({**settings, "blocks": frozen.blocks, "sizes": frozen.sizes}, sort_keys=True)
    if not file.is_file() or _settings_key(file) != key:
        images = open_labelled(task.data.train, task.data.classes)
        train = draw_subset(images, task.data.limit, task.data.train)
        test = open_labelled(task.data.test, images.classes)
        indices = evenly_spaced(len(test), limit)
        train_size = task.data.image_size
        tensors = dict(zip(("train", "train.labels"), _compute_tokens(
            model, task, frozen.blocks, train_size, train, range(len(train)), precision
        ), strict=True))  # fmt: skip
        for size in frozen.sizes:
            tensors[str(size)], tensors["test.labels"] = _compute_tokens(
                model, task, frozen.blocks, size, test, indices, precision
            )
        with atomic_write(file) as handle:
            handle.write(save(tensors, {"key": key, "classes": str(len(images.classes))}))
    with safe_open(file, "pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        classes = int(handle.metadata()["classes"])
    labels = {part: tensors.pop(f"{part}.labels") for part in ("train", "test")}
    return Tokens(tensors, labels, classes)


def fit(config: VisionConfig, frozen: FrozenConfig, stored: Tokens) -> dict[str, float]:
    """Train one run; return `top1@SIZE` and `loss@SIZE` of each supported size, and costs."""
    task, training = config.task, config.training
    assert isinstance(task, ClassificationConfig)
    tail = _new_tail(task, frozen, stored.classes, training.seed)
    sample = stored.by_part["train"][:BATCH]
    plain = task.model_copy(update={"model": task.model.model_copy(update={"positions": ()})})
    # Any seed: its features come from the pretrained weights, not from the new head.
    plain_tail = _new_tail(plain, frozen, stored.classes, 0)
    encodings = tail.encodings()
    weights = [parameter for encoding in encodings.values() for parameter in encoding.parameters()]
    figures = {
        # Percent by which the encoding changes the features before training.
        "changed": _relative_change(tail, plain_tail, sample),
        # Of the trained part for one image, in millions.
        "macs": _macs(tail, sample[:1]),
        # Of the encoding, in thousands.
        "parameters": sum(parameter.numel() for parameter in weights) / 1e3,
    }
    adam = training.optimiser
    rates = {
        name: frozen.encoding_rate
        for name, encoding in encodings.items()
        if [*encoding.parameters()]
    }
    optimiser = build_adamw(
        tail, adam.model_copy(update={"lr_multipliers": {**adam.lr_multipliers, **rates}})
    )
    batches = _batches(len(stored.labels["train"]), config)
    if warning := adam.warmup_warning(len(batches)):
        print(warning, file=sys.stderr)
    bf16 = training.precision == "bf16"
    start, cpu_seconds = time.monotonic(), []
    tail.train()
    for step, indices in enumerate(batches):
        cpu_start = time.process_time()
        set_learning_rate(optimiser, adam.learning_rate_at(step, len(batches)))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = tail(stored.by_part["train"][indices])
        loss = functional.cross_entropy(
            logits.float(), stored.labels["train"][indices], label_smoothing=task.label_smoothing
        )
        optimiser.zero_grad()
        loss.backward()
        if adam.clip is not None:
            nn.utils.clip_grad_norm_(tail.parameters(), adam.clip)
        optimiser.step()
        cpu_seconds.append((time.process_time() - cpu_start) / len(indices))
    seconds = time.monotonic() - start
    # CPU time of a training image: the median over steps, as the machine has other work.
    figures["ms"] = 1e3 * float(torch.tensor(cpu_seconds).median())
    for size in frozen.sizes:
        figures |= _test(tail, size, stored, bf16)
    costs = {"training/steps": len(batches), "training/minutes": seconds / 60}
    return figures | costs


def _new_tail(task: ClassificationConfig, frozen: FrozenConfig, classes: int, seed: int) -> Tail:
    # With equal seeds, runs with different encodings start from the same head.
    torch.manual_seed(seed)
    return Tail(task, frozen.blocks, classes)


def _batches(images: int, config: VisionConfig) -> list[Tensor]:
    """Return the image indices of each step; an epoch drops its incomplete last batch."""
    training = config.training
    if images < training.batch:
        raise ConfigError(f"training.batch {training.batch} is more than the {images} images")
    steps_per_epoch = images // training.batch
    steps = training.steps or steps_per_epoch * (training.epochs or 1)
    batches: list[Tensor] = []
    for epoch in range(-(-steps // steps_per_epoch)):
        order = make_rng(training.seed, epoch, 0, "order").permutation(images)
        whole = torch.from_numpy(order[: steps_per_epoch * training.batch])
        batches += whole.view(steps_per_epoch, training.batch).unbind()
    return batches[:steps]


@torch.no_grad()
def _relative_change(tail: Tail, plain: Tail, tokens: Tensor) -> float:
    reference = plain.eval().features(tokens)
    difference = tail.eval().features(tokens) - reference
    return 100 * float(difference.norm() / reference.norm())


@torch.no_grad()
def _macs(tail: Tail, tokens: Tensor) -> float:
    """Count multiply-accumulates of matrix products, in millions."""
    # The counter misses products inside fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tail.eval()(tokens)
    return counter.get_total_flops() / 2e6


@torch.no_grad()
def _test(tail: Tail, size: int, stored: Tokens, bf16: bool) -> dict[str, float]:
    """Compute accuracy in percent and cross-entropy in nats; empty for an unsupported grid."""
    tokens, labels = stored.by_part[str(size)], stored.labels["test"]
    side = size // int(tail.model.patch_embed.patch_size[0])
    # Some encodings cannot be resampled to other grids.
    try:
        model = tail.for_grid((side, side)).eval()
    except ValueError:
        return {}
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = torch.cat([model(chunk) for chunk in tokens.split(BATCH)]).float()
    correct = (logits.argmax(-1) == labels).float().mean()
    loss = functional.cross_entropy(logits, labels)
    return {f"top1@{size}": 100 * float(correct), f"loss@{size}": float(loss)}


@torch.no_grad()
def _compute_tokens(
    model: BackboneConfig,
    task: ClassificationConfig,
    blocks: int,
    size: int,
    images: LabelledImages,
    indices: Sequence[int],
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Compute outputs (images, tokens, width) of the first blocks, and labels (images,)."""
    frozen: Any = create_backbone(model, num_classes=len(images.classes), img_size=size).eval()
    frozen.blocks, frozen.norm = frozen.blocks[:blocks], nn.Identity()
    preprocess = Preprocessing(size, task.data.mean, task.data.std)
    tokens, labels = [], []
    for start in range(0, len(indices), BATCH):
        samples = [images.read(index) for index in indices[start : start + BATCH]]
        pixels = torch.stack([preprocess(sample.image) for sample in samples])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            tokens.append(frozen.forward_features(pixels).bfloat16())
        labels += [sample.label for sample in samples]
    return torch.cat(tokens), torch.tensor(labels)


def _settings_key(file: Path) -> str:
    with safe_open(file, "pt") as handle:
        return str((handle.metadata() or {}).get("key"))
