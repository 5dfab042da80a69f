"""The queue of past keys that the contrastive loss compares with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.compilation import off_cpu, region


class Keys(NamedTuple):
    """Contrastive keys (K, dim), `Batch.pair_ids` (K, 2) of images and captions, valid (K,)."""

    image: Tensor
    text: Tensor
    image_ids: Tensor
    valid: Tensor


@region
def _write(
    queue: tuple[Tensor, ...],
    new: tuple[Tensor, ...],
    valid: Tensor | None,
    pointer: Tensor,
    filled: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write image and text keys and their ids over the oldest; return pointer and number."""
    size = len(queue[0])
    accepted = new[0].isfinite().all(-1) & new[1].isfinite().all(-1)
    if valid is not None:
        accepted &= valid
    number = accepted.sum()
    # Accepted rows come first, in order. Their number is fixed, so that no step waits for the
    # device, and rows beyond the accepted ones are not written.
    order = torch.arange(min(len(accepted), size), device=accepted.device)
    order = order + (number - size).clamp(min=0)
    row = accepted.logical_not().sort(stable=True).indices[order.clamp(max=len(accepted) - 1)]
    position, written = (order + pointer) % size, order < number
    for keys, rows in zip(queue, new, strict=True):
        rows, old = rows[row].to(keys), keys[position]
        keys[position] = torch.where(written.view(-1, *[1] * (keys.ndim - 1)), rows, old)
    return (pointer + number) % size, (filled + number).clamp(max=size)


class KeyQueue:
    """First-in first-out ring of (image key, text key, ids of both), MoCo's dynamic dictionary.

    Every rank pushes the same gathered keys and holds the same queue. Size 0 is no queue.
    """

    # No `nn.Module`, so that a task does not register it as a part of the student.
    def __init__(self, size: int, dim: int, device: torch.device | str = "cpu") -> None:
        if size < 0:
            raise ValueError(f"a queue cannot hold {size} keys")
        self.size = size
        self.image = torch.zeros(size, dim, device=device)
        self.text = torch.zeros(size, dim, device=device)
        self.image_ids = torch.full((size, 2), -1, dtype=torch.int64, device=device)
        # The next position and the number of keys are 0-d tensors: no push waits for the device.
        self.pointer = torch.zeros((), dtype=torch.int64, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)

    def to(self, device: torch.device | str) -> KeyQueue:
        """Move the keys to `device`."""
        self.image = self.image.to(device)
        self.text = self.text.to(device)
        self.image_ids = self.image_ids.to(device)
        self.pointer, self.filled = self.pointer.to(device), self.filled.to(device)
        return self

    def keys(self) -> Keys:
        """Return the keys in the queue, as views that the next `push` overwrites."""
        # Counting keys would wait for a GPU, which gets the empty positions, too, as not valid.
        end = self.size if off_cpu(self.image) else int(self.filled)
        valid = torch.arange(end, device=self.image.device) < self.filled
        return Keys(self.image[:end], self.text[:end], self.image_ids[:end], valid)

    @torch.no_grad()
    def push(
        self, image: Tensor, text: Tensor, image_ids: Tensor, valid: Tensor | None = None
    ) -> None:
        """Append keys of all ranks, (R, dim), (R, dim), (R, 2); the oldest make room.

        `image_ids` (R, 2) are of images and captions, or (R,) of images alone. Rows with `valid`
        (R,) False and keys that are not finite are left out. Of more rows than the queue holds, the
        last stay.
        """
        # A queue of the student's own past features destroys the contrastive loss: R@1 below 1 %.
        if image.requires_grad or text.requires_grad:
            raise ValueError("the queue takes the teacher's keys only, not the student's features")
        if self.size == 0:
            return
        queue, new = (self.image, self.text, self.image_ids), (image, text, _pair_ids(image_ids))
        self.pointer, self.filled = _write(queue, new, valid, self.pointer, self.filled)

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys, ids and the ring's position as tensors, for the checkpoint."""
        return {
            "image": self.image,
            "text": self.text,
            "image_ids": self.image_ids,
            "pointer": self.pointer,
            "filled": self.filled,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        if state["image"].shape != self.image.shape:
            raise ValueError(
                f"the checkpoint's queue is {tuple(state['image'].shape)}, "
                f"this one {tuple(self.image.shape)}"
            )
        self.image.copy_(state["image"])
        self.text.copy_(state["text"])
        self.image_ids.copy_(_pair_ids(state["image_ids"]))
        self.pointer.copy_(state["pointer"])
        self.filled.copy_(state["filled"])


def _pair_ids(ids: Tensor) -> Tensor:
    """Return ids (R, 2) of images and captions; of images alone (R,) no two captions are equal."""
    return ids if ids.ndim == 2 else ids[:, None].expand(-1, 2)
