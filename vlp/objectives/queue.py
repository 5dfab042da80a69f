"""The queue of a teacher's past keys for the contrastive loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.compilation import off_cpu, region


class Keys(NamedTuple):
    """Contrastive keys of images and texts, (K, dim), their `Batch.pair_ids` (K, 2), valid (K,)."""

    image: Tensor
    text: Tensor
    pair_ids: Tensor
    valid: Tensor


# Keys of a checkpoint, and the attributes of a queue that they hold.
_STATE = {
    "image": "image",
    "text": "text",
    "image_ids": "pair_ids",
    "pointer": "pointer",
    "filled": "filled",
}


@region
def _write(
    queue: tuple[Tensor, ...],
    new: tuple[Tensor, ...],
    valid: Tensor | None,
    pointer: Tensor,
    filled: Tensor,
) -> tuple[Tensor, Tensor]:
    """Overwrite the oldest keys and ids; return the new pointer and number of keys."""
    size = len(queue[0])
    accepted = new[0].isfinite().all(-1) & new[1].isfinite().all(-1)
    if valid is not None:
        accepted &= valid
    number = accepted.sum()
    # Sort accepted rows to the front and write a fixed number of rows, of which the rows that are
    # not accepted keep the old keys: without a synchronisation.
    order = torch.arange(min(len(accepted), size), device=accepted.device)
    order = order + (number - size).clamp(min=0)
    row = accepted.logical_not().sort(stable=True).indices[order.clamp(max=len(accepted) - 1)]
    position, written = (order + pointer) % size, order < number
    for keys, rows in zip(queue, new, strict=True):
        rows, old = rows[row].to(keys), keys[position]
        keys[position] = torch.where(written.view(-1, *[1] * (keys.ndim - 1)), rows, old)
    return (pointer + number) % size, (filled + number).clamp(max=size)


class KeyQueue:
    """First-in first-out ring of image keys, text keys and ids, MoCo's dynamic dictionary.

    Every rank pushes the same gathered keys and holds the same queue. Size 0 is no queue.
    """

    # No `nn.Module`, so that a task does not register it as a part of the student.
    def __init__(self, size: int, dim: int, device: torch.device | str = "cpu") -> None:
        if size < 0:
            raise ValueError(f"a queue has at least 0 keys, not {size}")
        self.size = size
        self.image = torch.zeros(size, dim, device=device)
        self.text = torch.zeros(size, dim, device=device)
        self.pair_ids = torch.full((size, 2), -1, dtype=torch.int64, device=device)
        # 0-d tensors, so that no push needs a synchronisation.
        self.pointer = torch.zeros((), dtype=torch.int64, device=device)
        self.filled = torch.zeros((), dtype=torch.int64, device=device)

    def to(self, device: torch.device | str) -> KeyQueue:
        """Move the keys to `device`."""
        for name in _STATE.values():
            setattr(self, name, getattr(self, name).to(device))
        return self

    def keys(self) -> Keys:
        """Return the keys in the queue, as views that the next `push` overwrites."""
        # On a GPU, counting keys would be a synchronisation: it gets all, empty ones not valid.
        end = self.size if off_cpu(self.image) else int(self.filled)
        valid = torch.arange(end, device=self.image.device) < self.filled
        return Keys(self.image[:end], self.text[:end], self.pair_ids[:end], valid)

    @torch.no_grad()
    def push(
        self, image: Tensor, text: Tensor, pair_ids: Tensor, valid: Tensor | None = None
    ) -> None:
        """Replace the oldest keys by keys of all ranks; of more than `size` rows the last stay.

        Args:
            image, text: (R, dim); rows that are not finite are left out.
            pair_ids: (R, 2) of images and captions, or (R,) of images.
            valid: (R,) bool; other rows are left out.
        """
        # A queue of the student's own past features destroys the contrastive loss: R@1 below 1 %.
        if image.requires_grad or text.requires_grad:
            raise ValueError("the queue takes the teacher's keys only, not the student's features")
        if self.size == 0:
            return
        ids = pair_ids if pair_ids.ndim == 2 else pair_ids[:, None].expand(-1, 2)
        queue, new = (self.image, self.text, self.pair_ids), (image, text, ids)
        self.pointer, self.filled = _write(queue, new, valid, self.pointer, self.filled)

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys, ids, pointer and number of keys, for the checkpoint."""
        return {key: getattr(self, name) for key, name in _STATE.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict` of a queue of the same size."""
        if state["image"].shape != self.image.shape:
            raise ValueError(
                f"the checkpoint's queue is {tuple(state['image'].shape)}, "
                f"this one {tuple(self.image.shape)}"
            )
        for key, tensor in self.state_dict().items():
            tensor.copy_(state[key])
