"""Part B: losses and gradients of a step, and steps of downstream tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.benchmarks.gpu.figures import CheckedFigure, Setting
from evaluation.benchmarks.pretrain_step import random_batch
from vlp.data.image.transforms import Preprocessing
from vlp.data.text.tokenizer import TextProcessor, bert_tokenizer
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.tasks.caption.data import CaptionBatch
from vlp.tasks.caption.task import CaptionConfig, CaptionTask
from vlp.tasks.grounding.task import Grounding, GroundingConfig
from vlp.tasks.pair_classification.data import PairBatch
from vlp.tasks.pair_classification.task import (
    Nlvr2AssignmentConfig,
    Nlvr2Config,
    PairClassification,
    SnliVeConfig,
)
from vlp.tasks.pretraining import Pretraining
from vlp.tasks.retrieval.task import Retrieval, RetrievalConfig
from vlp.tasks.vqa.data import VqaBatch
from vlp.tasks.vqa.task import Vqa, VqaConfig
from vlp.training.engines.compile import compile_task

ROWS = 4
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "circle", "yes", "no"]


def losses(setting: Setting) -> Iterator[CheckedFigure]:
    """Compare losses and gradients of a float32 step on the device with a CPU's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    batch = random_batch(setting.config.inputs, ROWS, 3)

    def step(place: torch.device, how: Any) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        settings = setting.config
        task = Pretraining(settings.model, settings.objectives, "", "float32", log_every=10**6)
        compile_task(task.to(place), how, place, setting.backend)
        loss = task(batch.to(place), 1).loss
        loss.backward()
        gradients = [p.grad.flatten().cpu() for p in task.parameters() if p.grad is not None]
        return float(loss.detach()), torch.cat(gradients)

    loss, gradient = step(torch.device("cpu"), "none")
    for how in ("none", "blocks"):
        here, found = step(setting.device, how)
        name = "a step as written" if how == "none" else "a step of compiled blocks"
        error = abs(here - loss) / abs(loss)
        yield CheckedFigure(f"{name}: loss from a CPU's", error, "", at_most=1e-4, correctness=True)
        error = float((found - gradient).norm() / gradient.norm())
        yield CheckedFigure(
            f"{name}: gradient from a CPU's", error, "", at_most=1e-3, correctness=True
        )


def tasks(setting: Setting) -> Iterator[CheckedFigure]:
    """Train each downstream task for one step; yield whether its loss and gradients are finite."""
    for name, (task, batch) in _downstream(setting).items():
        task.to(setting.device)
        loss = task(batch.to(setting.device), 0).loss
        loss.backward()
        found = [loss.detach(), *(p.grad for p in task.parameters() if p.grad is not None)]
        finite = len(found) > 1 and all(bool(torch.isfinite(x).all()) for x in found)
        yield CheckedFigure(f"{name}: one step", float(finite), "", at_least=1, correctness=True)


def _downstream(setting: Setting) -> dict[str, tuple[nn.Module, Any]]:
    settings = setting.config
    text = TextProcessor(
        bert_tokenizer({word: number for number, word in enumerate(_WORDS)}),
        settings.model.text.max_tokens,
    )
    image = settings.model.image
    preparation = Preprocessing(image.image_size, *image.statistics)
    pairs = random_batch(settings.inputs, ROWS, 3)
    read = (pairs.text_ids, pairs.attention_mask, pairs.word_mask)
    answer = text(["red circle"] * ROWS).text_ids[:, :4]
    shares, owners = torch.ones(ROWS), torch.arange(ROWS)
    shards = {"train": ["unused"]}

    def parts() -> Loaded:
        return Loaded(VLPModel(settings.model), text, preparation)

    def classes(kind: Any, images: int) -> tuple[nn.Module, Any]:
        pixels = pairs.pixels[:, None].expand(-1, images, -1, -1, -1)
        labels = torch.zeros(ROWS, dtype=torch.int64)
        config = kind.model_validate({"data": shards})
        return PairClassification(config, parts()), PairBatch(pixels, *read, labels, pairs.valid)

    def on_pairs(kind: Any, config: Any) -> tuple[nn.Module, Any]:
        data = {"sources": [{"path": "unused"}]}
        objectives = {"mlm": None, "mim": None, "itm": {"group": ROWS}, "teacher": None}
        chosen = config.model_validate({"data": data, "objectives": objectives})
        return kind(chosen, parts()), pairs

    caption = CaptionConfig.model_validate({"data": shards | {"max_caption": 8}})
    question = VqaConfig.model_validate({"data": shards | {"max_answer": 8}})
    return {
        "retrieval": on_pairs(Retrieval, RetrievalConfig),
        "grounding": on_pairs(Grounding, GroundingConfig),
        "snli_ve": classes(SnliVeConfig, 1),
        "nlvr2": classes(Nlvr2Config, 2),
        "nlvr2_assignment": classes(Nlvr2AssignmentConfig, 2),
        "caption": (CaptionTask(caption, parts()), CaptionBatch(pairs.pixels, answer, pairs.valid)),
        "vqa": (
            Vqa(question, parts(), ["yes", "no"]),
            VqaBatch(pairs.pixels, *read, answer, owners, shares, pairs.valid),
        ),
    }
