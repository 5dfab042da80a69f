import json
import math

import torch
import torch.nn.functional as F
from torch import nn

from vlp.data.shards.sample_files import SkippedSample
from vlp.data.stream.batch import Batch
from vlp.distributed import broadcast_tensors
from vlp.io import write_tensors
from vlp.tasks.task import StepOutput, autocast
from vlp.training.config import PretrainConfig
from vlp.training.engines.engine import Update
from vlp.training.loop import train
from vlp.training.optimiser import OptimiserConfig
from vlp.training.run_folder import RunFolder

TOKENS = 31
STREAMS = 2
# Retries are counted by process: a prefetch that another test left behind may still repeat.
TIMES = ("seconds", "samples_per_second", "data_wait_share", "store_retries")


class Encoder(nn.Module):
    """Has a direct parameter, a buffer, and a second entry beside `forward`."""

    def __init__(self, width):
        super().__init__()
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, width))
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("seen", torch.zeros(()))

    def no_weight_decay(self):
        return {"cls_token"}

    def encode(self, x):
        return self.norm(F.gelu(self.linear(x))) + self.cls_token

    def forward(self, x):
        return self.encode(x)


class ToyTask(nn.Module):
    """Predicts tokens from themselves; every habit that is hard for ZeRO-3 is in it.

    One encoder is used twice, once beside its `forward`; the decoder is the word embedding, passed
    to a function; a temperature is a scalar; one layer is never used.
    """

    def __init__(self, width=24, precision="float32"):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.encoder = Encoder(width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(TOKENS))
        self.log_temperature = nn.Parameter(torch.tensor(0.1))
        self.unused = nn.Linear(3, 5)
        self.precision = precision
        self.average = None
        self.dtypes = set()
        self.skipped = 0

    def forward(self, batch, step):
        ids = batch.text_ids
        with autocast(ids.device, self.precision):
            first = self.encoder(self.embedding(ids))
            states = self.out(self.encoder.encode(first))
            logits = F.linear(states, self.embedding.weight, self.bias)
            self.dtypes = {states.dtype, logits.dtype}
        scale = self.log_temperature.exp()
        errors = F.cross_entropy((logits.float() * scale).flatten(0, 1), ids.flatten())
        loss = errors + 0 * batch.pixels.sum()  # an image that is not finite spoils the loss
        self.encoder.seen += errors.detach()
        return StepOutput(loss, {"words": errors}, {"scale": scale.detach()})

    def after_step(self, parameters, applied=None):
        new = {name: value.clone() for name, value in parameters().items()}
        if self.average is None:
            self.average = new
        for name, value in new.items():
            if applied is None or applied:
                self.average[name].lerp_(value, 0.1)

    def after_skip(self):
        self.skipped += 1

    def extra_state(self):
        return {f"average.{name}": value for name, value in (self.average or {}).items()}

    def load_extra_state(self, state):
        self.average = {n.removeprefix("average."): value for n, value in state.items()} or None

    def save_model(self, folder, state):
        folder.mkdir()
        write_tensors(folder / "model.safetensors", state)


class ToyData:
    """Batch b of the endless run is a function of b; `bad` batches hold infinite pixels."""

    def __init__(self, batch=8, epoch=32, bad=frozenset(), before=lambda number: None):
        self.batch, self.epoch, self.bad, self.before = batch, epoch, bad, before
        self.fingerprint = {"source": f"{epoch} samples"}

    def samples_in_epoch(self, epoch):
        return self.epoch

    def batches_left(self, samples_consumed, epochs):
        epoch, within = divmod(samples_consumed, self.epoch)
        if epoch >= epochs:
            return 0
        whole = math.ceil(self.epoch / self.batch)
        return math.ceil((self.epoch - within) / self.batch) + (epochs - epoch - 1) * whole

    def batches(self, samples_consumed=0, rank=0, world_size=1):
        number = samples_consumed // self.batch
        while True:
            self.before(number)
            ids = torch.randint(
                TOKENS, (self.batch, 5), generator=torch.Generator().manual_seed(number)
            )
            share = self.batch // world_size
            ids = ids[rank * share : (rank + 1) * share]
            number += 1
            yield toy_batch(ids, spoilt=number - 1 in self.bad), number * self.batch


def toy_batch(ids, spoilt=False):
    rows, words = ids.shape
    on = torch.ones(rows, words, dtype=torch.bool)
    return Batch(
        pixels=torch.full((rows, 1), math.inf if spoilt else 0.0),
        text_ids=ids,
        attention_mask=on,
        word_mask=on,
        mlm_ids=ids,
        mlm_labels=ids,
        mim_mask=torch.zeros(rows, 1, 1, dtype=torch.bool),
        image_ids=torch.arange(rows),
        uniform=torch.zeros(rows, 2, dtype=torch.float64),
        valid=torch.ones(rows, dtype=torch.bool),
        sample_ids=torch.arange(rows),
        skipped=(SkippedSample("truncated image", "shard-000.tar: 7"),) if spoilt else (),
    )


class PlainEngine:
    """The `Engine` protocol in plain PyTorch on one process: what DeepSpeed is held against."""

    def __init__(self, task, config):
        self.rank, self.world_size, self.device = 0, 1, torch.device("cpu")
        self.module, self.config = task, config
        decayed, plain = [], []
        for name, parameter in task.named_parameters():
            matrix = parameter.ndim > 1 and name != "encoder.cls_token"
            (decayed if matrix else plain).append(parameter)
        settings = config.optimiser
        self.optimiser = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=settings.betas,
            eps=settings.epsilon,
        )

    def forward(self, batch, step):
        return self.module(batch, step)

    def backward(self, loss):
        (loss / self.config.gradient_accumulation_steps).backward()

    def step(self, learning_rate):
        parameters = list(self.module.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        clip = self.config.optimiser.clip or math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, clip))
        if math.isfinite(norm):
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate
            self.optimiser.step()
        self.optimiser.zero_grad()
        return Update(math.isfinite(norm), norm if math.isfinite(norm) else math.inf)

    def parameters(self):
        return {name: value.detach() for name, value in self.module.named_parameters()}

    def state_dict(self):
        return self.module.state_dict()

    def snapshot(self):
        state = dict(self.module.state_dict())
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                state[f"{key}:{name}"] = value
        return {"weights.safetensors": {name: value.clone() for name, value in state.items()}}

    def load(self, folder):
        assert folder is not None
        state = dict(broadcast_tensors(folder / "weights.safetensors"))
        moments = {name: state.pop(name) for name in list(state) if ":" in name}
        self.module.load_state_dict(state)
        for name, parameter in self.module.named_parameters():
            found = {k: moments.get(f"{k}:{name}") for k in ("step", "exp_avg", "exp_avg_sq")}
            if found["step"] is not None:
                self.optimiser.state[parameter] = found


class UnreadEngine(PlainEngine):
    """As on a GPU, whose outcomes are tensors that nobody has read."""

    def step(self, learning_rate):
        applied, norm, _ = super().step(learning_rate)
        return Update(torch.tensor(applied), torch.tensor(norm))


def toy_config(output="unused", **training):
    values = {
        "batch": 8,
        "steps": 8,
        "precision": "float32",
        "log_every": 2,
        "checkpoint_every": 3,
        "optimiser": OptimiserConfig(
            learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, clip=0.5
        ),
    }
    return PretrainConfig.model_validate(
        {
            "output": str(output),
            "data": {"sources": [{"path": "none"}], "canonical_streams": STREAMS},
            "training": values | training,
        }
    )


def run(folder, data=None, resume=False, engine=PlainEngine, task=None, best=None, **training):
    """Train the toy; return its task and the report."""
    torch.manual_seed(0)
    config = toy_config(folder, **training)
    task = task or ToyTask(precision=config.training.precision)
    engine, place = engine(task, config.training), RunFolder(folder, resume)
    return task, train(config, task, data or ToyData(), engine, place, resume, best)


def log_lines(folder, times=True):
    """The lines of a run's log, without `times` only what equal runs have in common."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: v for key, v in line.items() if times or key not in TIMES} for line in lines]
