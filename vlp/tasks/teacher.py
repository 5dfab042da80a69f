"""Momentum teachers (ALBEF): of pretraining, and for distillation in fine-tuning."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from vlp.data.stream.batch import Batch
from vlp.distributed import gather, start_gather
from vlp.models.cross_encoder import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel
from vlp.objectives.config import MomentumConfig, TeacherConfig
from vlp.objectives.queue import KeyQueue, Keys
from vlp.precision import full_precision
from vlp.tasks.downstream.task import Downstream, DownstreamConfig
from vlp.tasks.task import AUTOCAST, strip_prefix

Student = TypeVar("Student", bound=nn.Module)

# Weight of the teacher's predictions in the targets of pretraining (ALBEF's alpha).
SOFT_SHARE = 0.4
# Prefix of the teacher's names in a task's extra state.
_PREFIX = "teacher."


def half_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that autocast casts, by name: of linear and convolutional layers."""
    parameters = list(module.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in parameters)
    cast_ids = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
        for parameter in layer.parameters(recurse=False)
    }
    # A weight tied to an embedding has two names, and stays float32, as embeddings do.
    return {
        name: weight
        for name, weight in parameters
        if id(weight) in cast_ids and uses[id(weight)] == 1
    }


class Teacher(Generic[Student]):
    """Exponential moving average of a module's weights (MoCo; ALBEF, section 3.3).

    Call `module` under `torch.no_grad()`.

    Args:
        student: module to copy.
        autocast_dtype: dtype of `half_weights` in `module` from the first `to` on, which saves
            autocast a cast in each call; the average is computed on float32 masters. None: float32.
    """

    # No `nn.Module`, so that the weights are no parameters of the task that has it as a member.
    def __init__(self, student: Student, autocast_dtype: torch.dtype | None = None) -> None:
        # In bfloat16 an average with momentum 0.995 would never move.
        self.module: Student = copy.deepcopy(student).float().eval().requires_grad_(False)
        self._autocast_dtype = autocast_dtype
        # Weights in half precision, and their float32 masters, by name.
        self._half_weights: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}
        self._device: torch.device | None = None

    @torch.no_grad()
    def to(self, device: torch.device | str) -> Teacher[Student]:
        """Move the weights to `device`; the first call also casts `half_weights`."""
        device = torch.device(device)
        if device != self._device:  # `Module.to` walks all modules, too slow for every step
            self.module.to(device)
            self._device = device
            self._masters = {name: master.to(device) for name, master in self._masters.items()}
            if self._autocast_dtype and not self._masters:
                self._half_weights = half_weights(self.module)
                for name, weight in self._half_weights.items():
                    self._masters[name] = weight.data
                    weight.data = weight.data.to(self._autocast_dtype)
        return self

    @torch.no_grad()
    def update(
        self,
        parameters: Mapping[str, Tensor],
        momentum: float,
        buffers: Mapping[str, Tensor] | None = None,
        applied: Tensor | None = None,
    ) -> None:
        """Move every weight by 1 - momentum towards the student's.

        Args:
            parameters: full-size tensors by their names in the student; further names are
                ignored, and a missing name is a KeyError.
            buffers: likewise, but copied, and names may be missing.
            applied: 0-d bool on the weights' device; False leaves the weights unchanged.
        """
        teacher = {**dict(self.module.named_parameters()), **self._masters}
        weights = list(teacher.values())
        student = [parameters[name].detach().to(weight) for name, weight in teacher.items()]
        if applied is None:
            torch._foreach_lerp_(weights, student, 1 - momentum)
        else:  # `_foreach_lerp_` takes no tensor as its one weight
            deltas = torch._foreach_sub(student, weights)
            torch._foreach_mul_(deltas, applied * (1 - momentum))
            torch._foreach_add_(weights, deltas)
        if self._masters:
            torch._foreach_copy_(list(self._half_weights.values()), list(self._masters.values()))
        if buffers is not None:
            for name, buffer in self.module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers by name, for the checkpoint."""
        return {**self.module.state_dict(), **self._masters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`; RuntimeError for missing or unknown names."""
        self.module.load_state_dict(state)
        for name, master in self._masters.items():
            master.copy_(state[name])


def soft_target_share(step: int, alpha: float, warmup_steps: int) -> float:
    """Return the weight of soft targets, which rises linearly from 0 to `alpha` in the warm-up."""
    return alpha * min(1.0, step / warmup_steps) if warmup_steps > 0 else alpha


def gather_keys(image: ImageFeatures, text: TextFeatures, batch: Batch) -> Keys:
    """Gather the batch's keys from all ranks, in rank order."""
    return Keys(
        gather(image.feature), gather(text.feature), gather(batch.pair_ids), gather(batch.valid)
    )


def start_gather_keys(image: ImageFeatures, text: TextFeatures, batch: Batch) -> Callable[[], Keys]:
    """Start gathering keys, without gradients; the returned function waits for them."""
    features = start_gather(torch.cat([image.feature, text.feature], dim=1))
    valid = batch.valid.to(torch.int64)[:, None]
    ids_and_valid = start_gather(torch.cat([batch.pair_ids, valid], dim=1))

    def finish() -> Keys:
        ids, valid = ids_and_valid().split([2, 1], dim=1)
        images, texts = features().chunk(2, dim=1)
        return Keys(images, texts, ids, valid[:, 0].bool())

    return finish


class TeacherOutput(NamedTuple):
    """Output of the teacher for objectives."""

    # Features of the unmasked batch.
    image: ImageFeatures
    text: TextFeatures
    # Keys of the batches of all ranks; in training the queue's keys follow.
    keys: Keys
    # Weight of soft targets at this step, 0 in evaluation.
    alpha: float
    # `model` and copies of heads, for soft targets of other inputs; call them without gradient.
    modules: nn.ModuleDict

    @property
    def model(self) -> VLPModel:
        """Return the teacher's copy of the model."""
        return self.modules["model"]  # type: ignore[return-value]


class MomentumTeacher:
    """Momentum teacher of pretraining with its key queue; no `nn.Module`.

    Args:
        settings: momentum, queue and warm-up.
        student: `model`, and the heads that objectives read from the teacher.
        width: channels of a key.
        autocast_dtype: see `Teacher`.
    """

    def __init__(
        self,
        settings: TeacherConfig,
        student: Mapping[str, nn.Module],
        width: int,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.settings = settings
        self.average = Teacher(nn.ModuleDict(student), autocast_dtype)
        self.queue = KeyQueue(settings.queue, width)
        # Keys of the current step's batches (several with gradient accumulation), not yet queued.
        self._new_keys: list[Keys] = []
        self._keys_step = 0

    @torch.no_grad()
    def start(self, batch: Batch, step: int, training: bool) -> Callable[[], TeacherOutput]:
        """Encode the batch; the returned function waits for the keys of all ranks."""
        # Ranks exchange keys while the student encodes.
        device = batch.pixels.device
        modules = self.average.to(device).module
        self.queue.to(device)
        model: VLPModel = modules["model"]  # type: ignore[assignment]
        image = model.encode_image(batch.pixels)
        text = model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        finish_gather = start_gather_keys(image, text, batch)

        @torch.no_grad()
        def finish() -> TeacherOutput:
            keys, alpha = finish_gather(), 0.0
            if step != self._keys_step:  # leftover keys are of a skipped step
                self.forget()
            # Evaluation leaves the queue out: the loss would rise while the queue fills.
            if training:
                self._keys_step = step
                self._new_keys.append(keys)
                keys = Keys(*map(torch.cat, zip(keys, self.queue.keys())))
                alpha = soft_target_share(step, SOFT_SHARE, self.settings.warmup_steps)
            return TeacherOutput(image, text, keys, alpha, modules)

        return finish

    def after_step(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        applied: Tensor | None = None,
    ) -> None:
        """Move towards the student and push the step's keys, unless `applied` (0-d) is False."""
        self.average.update(parameters, self.settings.momentum, buffers, applied)
        for image, text, pair_ids, valid in self._new_keys:
            valid = valid if applied is None else valid & applied
            self.queue.push(image, text, pair_ids, valid)
        self.forget()

    def forget(self) -> None:
        """Drop the keys that wait for `after_step`."""
        self._new_keys.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return teacher and queue by name, the same on every rank."""
        state = {f"{_PREFIX}{name}": value for name, value in self.average.state_dict().items()}
        return state | {f"queue.{name}": value for name, value in self.queue.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        self.average.load_state_dict(strip_prefix(state, _PREFIX))
        self.queue.load_state_dict(strip_prefix(state, "queue."))


class DistillationConfig(MomentumConfig):
    """Momentum teacher of a downstream task."""

    alpha: float = Field(0.4, ge=0, le=1, description="share of the soft target")
    warmup_steps: int | None = Field(
        None, ge=0, description="alpha rises over these optimiser steps; null: the first epoch"
    )


class DistilledConfig(DownstreamConfig):
    """Configuration of a task that may have a teacher."""

    teacher: DistillationConfig | None = Field(
        None, description="momentum copy of the task that gives soft targets; null: no teacher"
    )


class Distilled(Downstream):
    """Base of tasks with an optional momentum teacher, which is extra state."""

    config: DistilledConfig
    teacher: Teacher[Any] | None = None
    _warmup_steps = 0

    def teachers(self) -> list[nn.Module]:
        """Return the teacher, if there is one."""
        return [] if self.teacher is None else [self.teacher.module]

    def start_teacher(self, epoch_steps: int) -> None:
        """Copy the task as its teacher, if configured; the default warm-up is `epoch_steps`."""
        if (settings := self.config.teacher) is not None:
            steps = settings.warmup_steps
            self._warmup_steps = epoch_steps if steps is None else steps
            self.teacher = Teacher(self, AUTOCAST.get(self.precision))

    def soft_target(
        self, step: int, device: torch.device, logits: Callable[[Self], Tensor]
    ) -> tuple[Tensor, float] | None:
        """Return the teacher's probabilities (..., classes), and their weight in the target.

        None in evaluation and without a teacher.

        Args:
            step: optimiser steps from 0.
            logits: computes (..., classes) logits of the batch; its argument is the teacher.
        """
        settings = self.config.teacher
        if self.teacher is None or settings is None or not self.training:
            return None
        with torch.no_grad():
            (teacher_logits,) = full_precision(logits(self.teacher.to(device).module))
        share = soft_target_share(step, settings.alpha, self._warmup_steps)
        return teacher_logits.softmax(-1), share

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Move the teacher towards the student, unless `applied` (0-d) is False."""
        if self.teacher is not None and self.config.teacher is not None:
            momentum = self.config.teacher.momentum
            self.teacher.update(parameters(), momentum, dict(self.named_buffers()), applied)

    def extra_state(self) -> dict[str, Tensor]:
        """Return the teacher by name, the same on every rank; empty without one."""
        state = {} if self.teacher is None else self.teacher.state_dict()
        return {f"{_PREFIX}{name}": value for name, value in state.items()}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `extra_state`; ValueError or RuntimeError if it does not fit."""
        if self.teacher is None:
            super().load_extra_state(state)
        else:
            self.teacher.load_state_dict(strip_prefix(state, _PREFIX))
