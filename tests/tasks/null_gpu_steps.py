"""Train a few steps of a task on the null CUDA device, for `test_null_gpu.py`.

A JSON line per case of the command line: `KIND`, `KIND:base`, `KIND:base:COMPILE`, or
`KIND:unanchored`, which is `KIND:base` without ACE-RPE.
"""

import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import nullgpu
import torch
from question_shards import toy_text
from tests_support import TINY_MODEL
from torch.cuda._sanitizer import CUDASanitizer, CUDASanitizerErrors
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import LOG_EVERY, count_waits, watched_config, watched_steps
from benchmarks.step import random_batch
from vlp.config import load_config
from vlp.data.image.transforms import Preprocessing
from vlp.data.stream.batch import Inputs
from vlp.data.stream.loader import CopyStream
from vlp.data.text.tokenizer import predicted_positions
from vlp.layers.blocks import FeedForward
from vlp.models.config import ModelConfig
from vlp.models.folder import Loaded
from vlp.models.vlp import VLPModel
from vlp.tasks.caption.data import CaptionBatch
from vlp.tasks.caption.task import CaptionTask
from vlp.tasks.downstream.registry import get_task
from vlp.tasks.grounding.task import Grounding
from vlp.tasks.pair_classification.data import PairBatch
from vlp.tasks.pair_classification.task import PairClassification
from vlp.tasks.pretraining import Pretraining
from vlp.tasks.retrieval.task import Retrieval
from vlp.tasks.teacher import Distilled
from vlp.tasks.vqa.data import VqaBatch
from vlp.tasks.vqa.task import Vqa
from vlp.training.config import PretrainConfig
from vlp.training.engines.compile import compile_task

ROWS = 32
BASE = "configs/pretrain/base.yaml"
NO_WEIGHTS = ["model.text.weights=null", "model.image.weights=null"]
PLACE = {"data": {"train": ["none"], "canonical_streams": 1}}
PAIRS = {"data": {"sources": [{"path": "none"}]}}


# PyTorch compiles it at its first call, for initial weights.
torch.Tensor.erfinv_ = lambda self: self


class Asked(NamedTuple):
    """Kernel launches, waits of the host by line, copies behind and beside kernels, peak memory."""

    launches: int
    waits: dict[str, int]
    copies: dict[str, int]
    gib: float


class Hook(nullgpu.Syncs):
    """Notes who waits for the device, by line, and copies to it."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()

    def __call__(self, name: bytes, kind: int, size: float) -> None:
        super().__call__(name, kind, size)
        if b"H2D" in name:
            behind = torch.cuda.current_stream() == torch.cuda.default_stream()
            self.copies["behind" if behind else "beside"] += 1


@contextlib.contextmanager
def asked() -> Iterator[list[Asked]]:
    """Give a list that gets what is asked within the context."""
    found = []
    hook = Hook()
    torch.cuda.reset_peak_memory_stats()
    nullgpu.hook(hook)
    nullgpu.reset()
    triton = nullgpu.counts()["triton"]  # which are never reset
    yield found
    counts = nullgpu.counts()
    nullgpu.hook(None)
    kernels = ("launch", "triton", "gemm", "memset", "d2d")
    launches = int(sum(counts[name] for name in kernels) - triton)
    gib = torch.cuda.max_memory_allocated() / 2**30
    found.append(Asked(launches, _waits(Counter(hook.c)), dict(hook.copies), gib))


def pretraining(config: PretrainConfig):
    training = config.training
    with torch.device("cuda"):
        task = Pretraining(
            config.model, config.objectives, "", training.precision, training.log_every
        )
    return task, random_batch(config.inputs, ROWS, 12)


def downstream(kind: str, model: ModelConfig):
    """Return a task of the registry, with a teacher where it may have one, and a batch of it."""
    with torch.device("cuda"):
        built = VLPModel(model)
    size, tokens = model.image.image_size, model.text.max_tokens
    parts = Loaded(built, toy_text(tokens), Preprocessing(size))
    spec, paired = get_task(kind), kind in ("retrieval", "grounding")
    asked = {"kind": kind, **(PAIRS if paired else PLACE)}
    if kind == "caption":
        asked["data"] = asked["data"] | {"max_caption": 8}
    if kind in ("snli_ve", "nlvr2", "vqa"):
        asked["teacher"] = {"warmup_steps": 0}
    config = spec.config.model_validate(asked)
    ids = torch.randint(5, 24, (ROWS, tokens))
    mask = torch.arange(tokens).expand(ROWS, -1) < tokens - 2
    valid = torch.ones(ROWS, dtype=torch.bool)
    texts = ids, mask, mask
    answers = torch.tensor([[2, 6, 3, 0], [2, 6, 7, 3]]).repeat(ROWS // 2, 1)
    places = predicted_positions(answers, 0)
    if paired:
        kinds = {"retrieval": Retrieval, "grounding": Grounding}
        task = kinds[kind](config, parts, "bf16")
        task.log_every = LOG_EVERY
        return task, random_batch(Inputs(size, model.image.grid, tokens, 24), ROWS, 12)
    if kind == "vqa":
        owners, shares = torch.arange(ROWS), torch.ones(ROWS)
        task = Vqa(config, parts, ["red", "green"], "bf16")
        pixels = torch.rand(ROWS, 3, size, size)
        batch = VqaBatch(pixels, *texts, answers, owners, shares, valid, positions=places)
    elif kind == "caption":
        task = CaptionTask(config, parts, "bf16")
        batch = CaptionBatch(torch.rand(ROWS, 3, size, size), answers, valid, positions=places)
    else:
        task = PairClassification(config, parts, "bf16")
        pixels = torch.rand(ROWS, config.num_images, 3, size, size)
        labels = torch.zeros(ROWS, dtype=torch.int64)
        batch = PairBatch(pixels, *texts, labels, valid)
    if isinstance(task, Distilled):
        task.start_teacher(1)
    return task, batch


def measure(case: str):
    kind, size, how = (*case.split(":"), "", "")[:3]
    run = [*NO_WEIGHTS, f"training.compile={how or 'none'}"]
    if size == "unanchored":
        run.append("model.cross.position=[]")
    config = watched_config(load_config(BASE, PretrainConfig, run), ROWS)
    if not size:
        small = ModelConfig.model_validate(TINY_MODEL)
        config = config.model_copy(update={"model": small})
    task, batch = pretraining(config) if kind == "pretrain" else downstream(kind, config.model)
    compile_task(task, config.training.compile, torch.device("cuda"))
    steps = [found for (found,) in watched_steps(config, task, batch, asked)]
    return {
        "case": case,
        "launches": steps[0].launches,
        "synchronisations": steps[0].waits,
        "logged": steps[-1].waits,
        "copies": steps[0].copies,
        "gib": max(step.gib for step in steps),
    }


def warned():
    """Count waits of a step as `python -m benchmarks gpu` does, by PyTorch's warnings."""
    config = load_config(BASE, PretrainConfig, NO_WEIGHTS)
    small = ModelConfig.model_validate(TINY_MODEL)
    config = watched_config(config.model_copy(update={"model": small}), ROWS)
    watch = functools.partial(count_waits, torch.device("cuda"))
    steps = watched_steps(config, *pretraining(config), watch)
    return {"case": "warned", "ordinary": steps[0], "logged": steps[-1]}


def _waits(found: Counter[Any]) -> dict[str, int]:
    """Count waits by line; a copy to the host is one wait, whether it is by itself or not."""
    lines = {}
    for (_, line), count in found.items():
        lines[line] = max(count, lines.get(line, 0))
    return lines


def copies():
    """Move a batch as training does, under PyTorch's search for races between streams."""
    device = torch.device("cuda")
    batch = random_batch(Inputs(32, (2, 2), 12, 24), ROWS, 12)
    sanitizer = CUDASanitizer()
    sanitizer.enable()
    stream = CopyStream(device)
    leaves = [leaf for leaf in tree_leaves(stream.move(batch)) if isinstance(leaf, torch.Tensor)]
    used = [leaf + 1 for leaf in leaves]  # raises where that would be a race
    places = {leaf.data_ptr() for leaf in leaves}
    del leaves
    blocks = [block for part in torch.cuda.memory_snapshot() for block in part["blocks"]]
    freed = [block["state"] for block in blocks if block["address"] in places]
    with torch.cuda.stream(torch.cuda.Stream(device)):
        early = batch.to(device)
    try:
        early.pixels.sum()
        found = False
    except CUDASanitizerErrors:
        found = True
    sanitizer.disable()
    return {"case": "copies", "used": len(used), "freed": freed, "finds_races": found}


def contraction():
    """Compare a feed-forward's gradients with a CPU's; last, as the device then computes."""
    import emul

    layer = FeedForward(8, 32)
    states = torch.randn(2, 3, 8, requires_grad=True)
    layer(states).square().sum().backward()
    wanted = [states.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    with emul.Emulate():
        moved = layer.to("cuda")
        given = states.detach().to("cuda").requires_grad_()
        moved(given).square().sum().backward()
        tensors = [given.grad, *(parameter.grad for parameter in moved.parameters())]
        found = [emul.alias(tensor) for tensor in tensors]
    return {"case": "contract", "equal": all(map(torch.equal, wanted, found))}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(measure(case)), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(warned()), flush=True)
    print(json.dumps(copies()), flush=True)
    print(json.dumps(contraction()), flush=True)
