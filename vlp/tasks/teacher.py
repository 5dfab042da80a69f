"""Momentum teacher of pretraining, and momentum distillation in fine-tuning (ALBEF)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
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
from vlp.tasks.task import AUTOCAST

Student = TypeVar("Student", bound=nn.Module)

# Share of a teacher's predictions in the targets of pretraining, as ALBEF's alpha.
SOFT_SHARE = 0.4


def half_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module's linear and convolutional layers, by name."""
    items = list(module.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in items)
    ids = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
        for parameter in layer.parameters(recurse=False)
    }
    # A table of words may also be the output layer, and the embedding reads it in float32.
    return {name: weight for name, weight in items if uses[id(weight)] == 1 and id(weight) in ids}


class RoundedWeights:
    """Weights that a module holds in half precision, with their float32 masters."""

    def __init__(self) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}

    def keep(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Round weights in place, by name, and keep their former values as masters."""
        for name, weight in weights.items():
            self._weights[name], self._masters[name] = weight, weight.data
            weight.data = weight.data.to(dtype)

    def masters(self) -> dict[str, Tensor]:
        """Return the masters by the names of their weights."""
        return dict(self._masters)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round the masters to their weights."""
        if self._weights:
            torch._foreach_copy_(list(self._weights.values()), list(self._masters.values()))

    def to(self, device: torch.device) -> None:
        """Move the masters; the module moves its weights."""
        self._masters = {name: master.to(device) for name, master in self._masters.items()}


class Teacher(Generic[Student]):
    """Exponential average of a module's weights (MoCo; ALBEF, section 3.3).

    Call it under `torch.no_grad()` through `module`.

    Args:
        student: module to copy.
        products: autocast's type for linear and convolutional weights. From the first `to` on
            `module` holds them in it, with float32 masters, so that autocast need not cast them in
            each call.
    """

    # No `nn.Module`, so that its holder, the optimiser and DeepSpeed do not see the weights.
    def __init__(self, student: Student, products: torch.dtype | None = None) -> None:
        # In bfloat16 an average with momentum 0.995 would never move.
        self.module: Student = copy.deepcopy(student).float().eval().requires_grad_(False)
        self._products = products
        self._rounded = RoundedWeights()
        self._device: torch.device | None = None

    @torch.no_grad()
    def to(self, device: torch.device | str) -> Teacher[Student]:
        """Move the weights to `device`."""
        device = torch.device(device)
        if device != self._device:  # else every step walks the modules
            self.module.to(device)
            self._device = device
            self._rounded.to(device)
            if self._products and not self._rounded.masters():
                self._rounded.keep(half_weights(self.module), self._products)
        return self

    @torch.no_grad()
    def update(
        self,
        named_parameters: Mapping[str, Tensor],
        momentum: float,
        named_buffers: Mapping[str, Tensor] | None = None,
        applied: Tensor | None = None,
    ) -> None:
        """Move every weight by 1 - momentum towards the student's.

        `named_parameters` holds full-size tensors by their names in the student, and may hold
        others; KeyError where one is missing. `named_buffers` are copied, not averaged. Where
        `applied`, 0-d bool on the weights' device, is False they stay as they are.
        """
        # The averaged tensor of a rounded weight is its master.
        teacher = {**dict(self.module.named_parameters()), **self._rounded.masters()}
        _check(teacher, named_parameters)
        weights = list(teacher.values())
        student = [named_parameters[name].detach().to(weight) for name, weight in teacher.items()]
        if applied is None:
            torch._foreach_lerp_(weights, student, 1 - momentum)
        else:
            moves = torch._foreach_sub(student, weights)
            torch._foreach_mul_(moves, applied * (1 - momentum))
            torch._foreach_add_(weights, moves)
        self._rounded.round_masters()
        if named_buffers is not None:
            for name, buffer in self.module.named_buffers():
                if name in named_buffers:
                    buffer.copy_(named_buffers[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers by name, for the checkpoint."""
        return {**self.module.state_dict(), **self._rounded.masters()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `state_dict`; missing or unknown names are errors."""
        self.module.load_state_dict(state)
        for name, master in self._rounded.masters().items():
            master.copy_(state[name])


def _check(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor]) -> None:
    missing = [name for name in teacher if name not in student]
    if missing:
        raise KeyError(
            f"the student has no {', '.join(missing[:3])} ({len(missing)} of {len(teacher)} "
            "teacher weights are missing)"
        )
    for name, weight in teacher.items():
        if weight.shape != student[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(student[name].shape)} in the student and "
                f"{tuple(weight.shape)} in the teacher: pass full-size (gathered) weights"
            )


def soft_target_share(step: int, alpha: float, warmup_steps: int) -> float:
    """Return the soft target's share at an optimiser step: linear from 0 to `alpha`."""
    return alpha * min(1.0, step / warmup_steps) if warmup_steps > 0 else alpha


def gather_keys(image: ImageFeatures, text: TextFeatures, batch: Batch) -> Keys:
    """Gather the batch's keys from all ranks, in rank order."""
    return Keys(
        gather(image.feature), gather(text.feature), gather(batch.pair_ids), gather(batch.valid)
    )


def start_gather_keys(image: ImageFeatures, text: TextFeatures, batch: Batch) -> Callable[[], Keys]:
    """Begin to gather keys without gradients; the returned call waits for them."""
    features = start_gather(torch.cat([image.feature, text.feature], dim=1))
    valid = batch.valid.to(batch.image_ids)[:, None]
    marks = start_gather(torch.cat([batch.pair_ids, valid], dim=1))

    def finish() -> Keys:
        ids, valid = marks().split([2, 1], dim=1)
        images, texts = features().chunk(2, dim=1)
        return Keys(images, texts, ids, valid[:, 0].bool())

    return finish


class TeacherOutput(NamedTuple):
    """Output of the teacher for objectives."""

    # Its features of the unmasked batch.
    image: ImageFeatures
    text: TextFeatures
    # The batch's, then the queue's.
    keys: Keys
    # Share of its soft targets at this step, 0 in evaluation.
    alpha: float
    # `model` and the copied heads, for soft targets of other inputs; call them without gradient.
    modules: nn.ModuleDict

    @property
    def model(self) -> VLPModel:
        """Return the teacher's copy of the model."""
        return self.modules["model"]  # type: ignore[return-value]


class MomentumTeacher:
    """Momentum copy of the student with its key queue; no `nn.Module`, `state_dict` has both.

    Args:
        settings: momentum, queue, and share of the soft targets.
        student: `model`, and the heads that objectives read from the teacher.
        width: channels of a key.
    """

    def __init__(
        self,
        settings: TeacherConfig,
        student: Mapping[str, nn.Module],
        width: int,
        products: torch.dtype | None = None,
    ) -> None:
        self.settings = settings
        self.average = Teacher(nn.ModuleDict(student), products)
        self.queue = KeyQueue(settings.queue, width)
        self._new_keys: list[Keys] = []
        self._keys_step = 0

    @torch.no_grad()
    def start(self, batch: Batch, step: int, training: bool) -> Callable[[], TeacherOutput]:
        """Encode the batch; the returned call waits for the keys of all ranks."""
        # The keys travel while the student encodes.
        device = batch.pixels.device
        modules = self.average.to(device).module
        self.queue.to(device)
        model: VLPModel = modules["model"]  # type: ignore[assignment]
        image = model.encode_image(batch.pixels)
        text = model.encode_text(batch.text_ids, batch.attention_mask, batch.word_mask)
        return partial(
            self._output, image, text, start_gather_keys(image, text, batch), step, training
        )

    @torch.no_grad()
    def _output(
        self,
        image: ImageFeatures,
        text: TextFeatures,
        gathered: Callable[[], Keys],
        step: int,
        training: bool,
    ) -> TeacherOutput:
        batch_keys, queue = gathered(), self.queue
        if step != self._keys_step:  # keys of a step that was skipped are not pushed
            self.forget()
        if training:
            self._keys_step = step
            self._new_keys.append(batch_keys)
        # A queue that fills would make a held-out loss rise, whatever the model learns.
        keys = Keys(*map(torch.cat, zip(batch_keys, queue.keys()))) if training else batch_keys
        settings = self.settings
        share = soft_target_share(step, SOFT_SHARE, settings.warmup_steps)
        alpha = share if training else 0.0
        return TeacherOutput(image, text, keys, alpha, self.average.module)

    def after_step(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        applied: Tensor | None = None,
    ) -> None:
        """Move to the new student and push the step's keys, unless `applied` (0-d) is False."""
        self.average.update(parameters, self.settings.momentum, buffers, applied)
        for image, text, image_ids, valid in self._new_keys:
            valid = valid if applied is None else valid & applied
            self.queue.push(image, text, image_ids, valid)
        self.forget()

    def forget(self) -> None:
        """Drop the keys that wait for `after_step`."""
        self._new_keys.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return teacher and queue by name, the same on every rank."""
        state = {f"teacher.{name}": value for name, value in self.average.state_dict().items()}
        return state | {f"queue.{name}": value for name, value in self.queue.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `state_dict`."""
        self.average.load_state_dict(strip_prefix(state, "teacher."))
        self.queue.load_state_dict(strip_prefix(state, "queue."))


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries under a prefix, by their names without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


_PREFIX = "teacher."


class DistillationConfig(MomentumConfig):
    """Momentum teacher of a downstream task."""

    alpha: float = Field(0.4, ge=0, le=1, description="share of the soft target")
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="alpha rises linearly over these optimiser steps; null: the first epoch",
    )


class DistilledConfig(DownstreamConfig):
    """Configuration of a task that may have a teacher."""

    teacher: DistillationConfig | None = Field(
        None, description="momentum copy of the task that gives soft targets; null: none"
    )


class SoftTarget(NamedTuple):
    """Prediction of a teacher, rows that sum to 1, and its share of the target."""

    soft: Tensor
    alpha: float


class Distilled(Downstream):
    """Base of tasks with an optional momentum copy, `teacher`, in the task's extra state."""

    config: DistilledConfig
    teacher: Teacher[Any] | None = None
    _warmup_steps = 0

    def teachers(self) -> list[nn.Module]:
        """Return the teacher, if there is one."""
        return [] if self.teacher is None else [self.teacher.module]

    def start_teacher(self, epoch_steps: int) -> None:
        """Copy the task as its teacher, where one is configured."""
        if (settings := self.config.teacher) is not None:
            steps = settings.warmup_steps
            self._warmup_steps = epoch_steps if steps is None else steps
            self.teacher = Teacher(self, AUTOCAST.get(self.precision))

    def soft_target(
        self, step: int, device: torch.device, logits: Callable[[Self], Tensor]
    ) -> SoftTarget | None:
        """Return the teacher's softmax at an optimiser step; None without one or in evaluation.

        Args:
            step: from 0.
            logits: computes (..., classes) logits of the batch with a task.
        """
        settings = self.config.teacher
        if self.teacher is None or settings is None or not self.training:
            return None
        with torch.no_grad():
            (teacher_logits,) = full_precision(logits(self.teacher.to(device).module))
        share = soft_target_share(step, settings.alpha, self._warmup_steps)
        return SoftTarget(teacher_logits.softmax(-1), share)

    def after_step(
        self, parameters: Callable[[], dict[str, Tensor]], applied: Tensor | None = None
    ) -> None:
        """Move the teacher towards the new student, if `applied` (0-d bool)."""
        if self.teacher is not None and self.config.teacher is not None:
            momentum = self.config.teacher.momentum
            self.teacher.update(parameters(), momentum, dict(self.named_buffers()), applied)

    def extra_state(self) -> dict[str, Tensor]:
        """Return the teacher by name, the same on every rank; empty without one."""
        state = {} if self.teacher is None else self.teacher.state_dict()
        return {f"{_PREFIX}{name}": value for name, value in state.items()}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of `extra_state`; RuntimeError if it is of another task."""
        if self.teacher is None:
            super().load_extra_state(state)
        else:
            self.teacher.load_state_dict(strip_prefix(state, _PREFIX))
