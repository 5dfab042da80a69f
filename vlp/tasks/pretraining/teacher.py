"""The momentum teacher's pass: its features of the batch, and the contrastive keys (ALBEF, 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlp.data.stream.batch import Batch
from vlp.distributed import gather, start_gather
from vlp.models.features import ImageFeatures, TextFeatures
from vlp.models.vlp import VLPModel
from vlp.objectives.config import TeacherConfig
from vlp.objectives.contrastive.momentum_teacher import Teacher, soft_target_share
from vlp.objectives.contrastive.queue import KeyQueue


class Keys(NamedTuple):
    """Contrastive keys of all ranks: image and text (K, d), image_ids (K,), valid (K,) bool."""

    image: Tensor
    text: Tensor
    image_ids: Tensor
    valid: Tensor


def gather_keys(image: ImageFeatures, text: TextFeatures, batch: Batch) -> Keys:
    """Gather the batch's keys from all ranks, in rank order."""
    return Keys(
        gather(image.feature), gather(text.feature), gather(batch.image_ids), gather(batch.valid)
    )


def start_gather_keys(image: ImageFeatures, text: TextFeatures, batch: Batch) -> Callable[[], Keys]:
    """Begin to gather keys without gradients, in two calls; what is returned waits for them."""
    features = start_gather(torch.cat([image.feature, text.feature], dim=1))
    marks = start_gather(torch.stack([batch.image_ids, batch.valid.to(batch.image_ids)], dim=1))

    def finish() -> Keys:
        ids, valid = marks().unbind(1)
        images, texts = features().chunk(2, dim=1)
        return Keys(images, texts, ids, valid.bool())

    return finish


class TeacherOutput(NamedTuple):
    """Output of the teacher for objectives.

    image, text: its features of the unmasked batch. keys: those of the batch, then those of the
    queue. alpha: share of its soft targets in the targets at this step, 0 in evaluation. modules:
    `model` and the copied heads by name, for soft targets of other inputs; call them without
    gradient.
    """

    image: ImageFeatures
    text: TextFeatures
    keys: Keys
    alpha: float
    modules: nn.ModuleDict

    @property
    def model(self) -> VLPModel:
        """The teacher's copy of the model."""
        return self.modules["model"]  # type: ignore[return-value]


class MomentumTeacher:
    """Momentum copy of the student with its key queue.

    Not an `nn.Module`: neither belongs to the task's parameters; `state_dict` has both.

    Args:
        settings: momentum, queue, and share of the soft targets.
        student: `model`, and the heads whose predictions objectives ask of the teacher.
        width: channels of a key.
        products: see `Teacher`.
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
        """Encode the batch; what is returned waits for the keys of all ranks.

        They travel while the student encodes. While training, they then wait for `after_step`.
        """
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
        fresh, queue = gathered(), self.queue
        if step != self._keys_step:  # keys of a step that was skipped are not pushed
            self.forget()
        if training:
            self._keys_step = step
            self._new_keys.append(fresh)
        # A queue that fills would make a held-out loss rise, whatever the model learns.
        keys = Keys(*map(torch.cat, zip(fresh, queue.keys()))) if training else fresh
        settings = self.settings
        share = soft_target_share(step, settings.alpha, settings.warmup_steps)
        alpha = share if training else 0.0
        return TeacherOutput(image, text, keys, alpha, self.average.module)

    def after_step(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        applied: Tensor | None = None,
    ) -> None:
        """Move towards the new student and push the step's keys into the queue.

        Where `applied` (0-d bool) is False, nothing moves.
        """
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
        """Take back what `state_dict` gave."""
        self.average.load_state_dict(strip_prefix(state, "teacher."))
        self.queue.load_state_dict(strip_prefix(state, "queue."))


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries under a prefix, by their names without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
