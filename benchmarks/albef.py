"""A pretraining step compared with ALBEF's unmodified code, with equal sizes and no dropout."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import harness
from benchmarks.harness import Figure
from benchmarks.step import Trainee, caption_lengths, random_batch
from vlp.config import ConfigError, Precision
from vlp.data.stream.batch import Batch
from vlp.training.config import PretrainConfig
from vlp.training.engines.environment import free_port, keep_freed_memory

ALBEF = "ALBEF"
EQUAL, ANCHORED = "ours, equal work", "ours with ACE-RPE"
ALL, ALL_ACE = "all losses", "all losses, layout ace"
BERT_WIDTH, BERT_VOCABULARY = 768, 30522
ALPHA, MOMENTUM, MASKED = 0.4, 0.995, 0.15
_PAD, _CLS, _MASK = 0, 2, 4


class StepSizes(NamedTuple):
    """Sizes of both models; heads have 64 channels, feed-forwards four times the width."""

    width: int = 384
    image_layers: int = 6
    text_layers: int = 3
    cross_layers: int = 3
    image_size: int = 160
    rows: int = 8
    max_tokens: int = 30
    queue: int = 1024

    @property
    def heads(self) -> int:
        """Return the attention heads of every layer."""
        return self.width // 64

    @property
    def vocabulary(self) -> int:
        """Return the vocabulary size; in proportion to the width, as the decoder's cost."""
        return BERT_VOCABULARY * self.width // BERT_WIDTH


def our_config(
    sizes: StepSizes,
    ace: bool = False,
    every_loss: bool = False,
    layout: str = "albef",
    precision: Precision = "float32",
) -> PretrainConfig:
    """Return a pretraining with ALBEF's losses, or with `every_loss` all default losses."""
    width, heads = sizes.width, sizes.heads
    layer = {"width": width, "heads": heads, "intermediate": 4 * width, "weights": None}
    teacher = {"queue": sizes.queue, "momentum": MOMENTUM, "warmup_steps": 0}
    objectives: dict[str, Any] = {"teacher": teacher, "itm": {"group": sizes.rows}}
    objectives["mlm"] = {"probability": MASKED}
    if every_loss:
        objectives["contrastive"] = {"token": {"group": min(16, sizes.rows)}}
    else:
        objectives |= {"contrastive": {"kind": "itc"}, "mim": None}
    return PretrainConfig.model_validate(
        {
            "model": {
                "text": layer
                | {
                    "layers": sizes.text_layers,
                    "vocab_size": sizes.vocabulary,
                    "max_tokens": sizes.max_tokens,
                },
                "image": layer | {"layers": sizes.image_layers, "image_size": sizes.image_size},
                "cross": {
                    "layers": sizes.cross_layers,
                    "heads": heads,
                    "intermediate": 4 * width,
                    "layout": layout,
                    "position": ["anchor"] if ace else [],
                },
            },
            "data": {"sources": [{"path": "none"}], "vocabulary": "none", "canonical_streams": 1},
            "objectives": objectives,
            "training": {
                "batch": sizes.rows,
                "precision": precision,
                "optimiser": {} if every_loss else {"clip": None},
            },
        }
    )


def variants(sizes: StepSizes, precision: Precision = "float32") -> dict[str, PretrainConfig]:
    """Return this project's configurations by name."""
    make = partial(our_config, sizes, precision=precision)
    return {
        EQUAL: make(),
        ANCHORED: make(ace=True),
        ALL: make(ace=True, every_loss=True),
        ALL_ACE: make(ace=True, every_loss=True, layout="ace"),
    }


class OurStep:
    """A pretraining task with its optimiser, a full queue and a warmed-up teacher."""

    def __init__(self, config: PretrainConfig, batch: Batch, device: torch.device) -> None:
        self.trainee = Trainee(config, device)
        teacher, self.batch = self.trainee.task.teacher, batch.to(device)
        assert teacher is not None
        size, width = teacher.queue.image.shape
        image, text = functional.normalize(torch.randn(2, size, width), dim=-1)
        # Negative ids: no key counts as the same image.
        ids = -1 - torch.arange(size)[:, None].expand(-1, 2)
        teacher.queue.push(image, text, ids, torch.ones(size, dtype=torch.bool))

    def losses(self) -> dict[str, float]:
        """Return the losses of the batch by name, without training."""
        losses = self.trainee.task(self.batch, 1).losses
        self.trainee.task.after_skip()
        return {name: float(loss) for name, loss in losses.items()}

    def step(self) -> float:
        """Train once; return the seconds."""
        return self.trainee.step(self.batch)["step"]


class AlbefStep:
    """ALBEF's model, from its checkout, with the optimiser of its recipe."""

    def __init__(self, folder: Path, sizes: StepSizes, batch: Batch, device: torch.device) -> None:
        module, self.device = import_albef(folder), device
        torch.manual_seed(0)
        self.model = build_albef(module, sizes).train()
        self.optimiser = torch.optim.AdamW(_albef_groups(self.model), lr=1e-4)
        # ALBEF's training pads a batch to its longest text; ours pads to `--max-tokens`.
        longest = int(batch.attention_mask.sum(1).amax())
        self.model.to(device)
        self.pixels = batch.pixels
        self.text = types.SimpleNamespace(
            input_ids=batch.text_ids[:, :longest],
            attention_mask=batch.attention_mask[:, :longest].long(),
        )

    def losses(self) -> dict[str, float]:
        """Return the losses of the batch by name; this updates teacher and queue, not weights."""
        names = ("mlm", "contrastive", "itm")
        losses = self.model(self.pixels, self.text, alpha=ALPHA)
        return {name: float(loss.detach()) for name, loss in zip(names, losses)}

    def step(self) -> float:
        """Train one step as in ALBEF's `Pretrain.py`; return the seconds."""

        def work() -> None:
            self.optimiser.zero_grad()
            mlm, contrastive, itm = self.model(self.pixels, self.text, alpha=ALPHA)
            (mlm + contrastive + itm).backward()
            self.optimiser.step()

        return harness.seconds(work, self.device)


def import_albef(folder: Path) -> types.ModuleType:
    """Import `models.model_pretrain` of a clone, with stand-ins for removed names."""
    if not (folder / "models" / "model_pretrain.py").is_file():
        raise ConfigError(f"--albef {folder}: no models/model_pretrain.py; name a clone of ALBEF")
    with ExitStack() as stack:
        for module, stand_ins in STAND_INS.items():
            # The module's dictionary, as `patch.object` needs names that exist.
            names = vars(importlib.import_module(f"transformers.{module}"))
            stack.enter_context(mock.patch.dict(names, stand_ins))
        stack.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        return importlib.import_module("models.model_pretrain")


class FormerPreTrainedModel(nn.Module):
    """Stand-in for PreTrainedModel of transformers 4.8, with the methods that ALBEF calls."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_pretrained(cls, name: str, config: Any) -> FormerPreTrainedModel:
        """Return a model with random weights, as public weights of these sizes do not exist."""
        return cls(config)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return next(self.parameters()).dtype

    def init_weights(self) -> None:
        """Initialise all modules, and tie the decoder to the word embeddings."""
        self.apply(self._init_weights)  # type: ignore[arg-type]
        decoder = getattr(self, "get_output_embeddings", None)
        if decoder is not None:
            bert: Any = self.bert
            decoder().weight = bert.get_input_embeddings().weight

    def get_head_mask(self, head_mask: None, layers: int) -> list[None]:
        """Return no mask for every layer."""
        return [None] * layers

    def invert_attention_mask(self, mask: Tensor) -> Tensor:
        """Turn a mask (B, K), 1 = may be attended to, into a bias (B, 1, 1, K)."""
        return (1.0 - mask[:, None, None, :].to(self.dtype)) * torch.finfo(self.dtype).min


def _call_unchunked(
    forward: Callable[..., Tensor], chunk_size: int, dimension: int, *inputs: Tensor
) -> Tensor:
    assert chunk_size == 0
    return forward(*inputs)


def _never(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("no step of ALBEF's calls this")


def _undocumented(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda function: function


# Names that transformers removed after 4.8, by module. Only `apply_chunking_to_forward` runs in a
# step.
STAND_INS: dict[str, dict[str, Any]] = {
    "modeling_utils": {
        "PreTrainedModel": FormerPreTrainedModel,
        "apply_chunking_to_forward": _call_unchunked,
        "find_pruneable_heads_and_indices": _never,
        "prune_linear_layer": _never,
    },
    "file_utils": {"add_code_sample_docstrings": _undocumented},
}


def build_albef(module: types.ModuleType, sizes: StepSizes) -> nn.Module:
    """Build ALBEF's pretraining model with random weights, in a process group of one."""
    if not torch.distributed.is_initialized():
        address = f"tcp://127.0.0.1:{free_port()}"
        torch.distributed.init_process_group("gloo", address, rank=0, world_size=1)
    # ALBEF's code has constant sizes of the image encoder.
    tower = {"embed_dim": sizes.width, "depth": sizes.image_layers, "num_heads": sizes.heads}
    vision = module.VisionTransformer

    def vision_of_sizes(**options: Any) -> nn.Module:
        return vision(**options | tower)

    bert = {
        "hidden_size": sizes.width,
        "encoder_width": sizes.width,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.width,
        "num_hidden_layers": sizes.text_layers + sizes.cross_layers,
        "fusion_layer": sizes.text_layers,
        "vocab_size": sizes.vocabulary,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    special = types.SimpleNamespace(pad_token_id=_PAD, cls_token_id=_CLS, mask_token_id=_MASK)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(bert, file)
        file.flush()
        config = {
            "mlm_probability": MASKED,
            "embed_dim": 256,
            "image_res": sizes.image_size,
            "vision_width": sizes.width,
            "bert_config": file.name,
            "temp": 0.07,
            "queue_size": sizes.queue,
            "momentum": MOMENTUM,
        }
        with mock.patch.object(module, "VisionTransformer", vision_of_sizes):
            return module.ALBEF(text_encoder="", tokenizer=special, config=config, init_deit=False)


def _albef_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups with ALBEF's weight decay, 0 for vectors."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    vectors, others = [p for p in trainable if p.ndim < 2], [p for p in trainable if p.ndim > 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.02}]


class Speeds(NamedTuple):
    """Losses before training, and seconds of timed steps, by task."""

    losses: dict[str, dict[str, float]]
    seconds: dict[str, list[float]]

    def ratios(self, name: str) -> list[float]:
        """Return the speed of a task relative to the first task, by turn."""
        first = self.seconds[next(iter(self.seconds))]
        return [a / b for a, b in zip(first, self.seconds[name])]


def measure(
    folder: Path | None,
    sizes: StepSizes,
    turns: int,
    device: torch.device,
    precision: Precision = "float32",
) -> Speeds:
    """Time all tasks by turns; folder: clone of ALBEF; None: without ALBEF."""
    configs = variants(sizes, precision)
    batch = random_batch(configs[ALL].inputs, sizes.rows, caption_lengths(sizes.rows)).to(device)
    tasks: dict[str, OurStep | AlbefStep] = {}
    if folder is not None:
        tasks[ALBEF] = AlbefStep(folder, sizes, batch, device)
    tasks |= {name: OurStep(config, batch, device) for name, config in configs.items()}
    losses = {name: task.losses() for name, task in tasks.items()}
    steps = {name: task.step for name, task in tasks.items()}
    return Speeds(losses, harness.interleave(steps, turns, warm_up=2))


def table(speeds: Speeds) -> str:
    """Format a row per task (medians, quartiles, ratio to the first), then the losses."""
    rows, losses = [], []
    for name, seconds in speeds.seconds.items():
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        lower, ratio, upper = np.quantile(speeds.ratios(name), (0.25, 0.5, 0.75))
        spread = f"{ratio:.2f} ({lower:.2f}-{upper:.2f})"
        rows.append([name, f"{1e3 * middle:.0f}", f"{1e3 * low:.0f}-{1e3 * high:.0f}", spread])
        parts = ", ".join(f"{part} {loss:.3f}" for part, loss in speeds.losses[name].items())
        losses.append(f"{name}: {parts}")
    head = ["step", "ms", "quartiles", f"times as fast as {next(iter(speeds.seconds))}"]
    return "\n".join([harness.table(head, rows), "", *losses])


def albef(
    albef: Path | None = None,
    turns: int = 7,
    width: int = 384,
    image_layers: int = 6,
    text_layers: int = 3,
    cross_layers: int = 3,
    image_size: int = 160,
    rows: int = 8,
    max_tokens: int = 30,
    queue: int = 1024,
    precision: Precision = "float32",
    device: harness.Device = None,
) -> None:
    """Time a pretraining step and ALBEF's own, by turns on the same random pairs.

    --albef is a clone of github.com/salesforce/ALBEF; without it only this project's steps are
    timed. A step is forward, backward, AdamW and the momentum teacher's update.

    "equal work" has ALBEF's losses (ITC with teacher and queue, ITM with hard negatives, MLM with
    the teacher's predictions), layers and layout, without gradient clipping; "with ACE-RPE" adds
    `anchor` to the cross-attention; "all losses" adds the default's objectives and clipping;
    "layout ace" is the default's layout, in which patches attend to words, too.
    """
    torch_device = harness.select_device(device)
    # Freed memory is kept as in training.
    if torch_device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    sizes = StepSizes(
        width, image_layers, text_layers, cross_layers, image_size, rows, max_tokens, queue
    )
    speeds = measure(albef, sizes, turns, torch_device, precision)
    print(table(speeds), end="\n\n")
    figures = []
    for name in speeds.seconds:
        key = f"albef/{name.replace(',', '').replace(' ', '_')}"
        figures.append(Figure(key, statistics.median(speeds.seconds[name]), "s"))
        figures.append(Figure(f"{key}/speed", statistics.median(speeds.ratios(name)), "x"))
    harness.print_figures(figures, torch_device)


COMMANDS = (albef,)
