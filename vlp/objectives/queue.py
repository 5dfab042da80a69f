"""The queue of a teacher's past keys for the contrastive loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vlp.compilation import off_cpu, region
from vlp.objectives.contrastive import as_pairs


class Keys(NamedTuple):
    """Contrastive keys of images and texts, (K, dim) each, with `Batch.pair_ids`, (K, 2) int64.

    valid: (K,) bool, False = empty row.
    """

    image: Tensor
    text: Tensor
    pair_ids: Tensor
    valid: Tensor


# Attribute of a queue by the checkpoint's key.
_STATE = {
    "image": "image",
    "text": "text",
    "image_ids": "pair_ids",
    "pointer": "pointer",
    "filled": "filled",
}


@region
def _overwrite_oldest(
    queue: tuple[Tensor, Tensor, Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    valid: Tensor,
    pointer: Tensor,
    filled: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write a batch (image keys, text keys, pair ids) over the oldest rows of a queue, in place.

    Returns the new pointer and number of keys.
    """
    size, rows = len(queue[0]), len(batch[0])
    mask = batch[0].isfinite().all(-1) & batch[1].isfinite().all(-1) & valid
    count = mask.sum()
    # Without a synchronisation `count` is unknown: sort valid rows to the front and write a fixed
    # number of rows, of which those beyond `count` write the old keys again.
    index = torch.arange(min(rows, size), device=mask.device) + (count - size).clamp(min=0)
    source = mask.logical_not().sort(stable=True).indices[index.clamp(max=rows - 1)]
    target, is_new = (index + pointer) % size, index < count
    for queue_rows, batch_rows in zip(queue, batch, strict=True):
        new, old = batch_rows[source].to(queue_rows), queue_rows[target]
        queue_rows[target] = torch.where(is_new.view(-1, *[1] * (old.ndim - 1)), new, old)
    return (pointer + count) % size, (filled + count).clamp(max=size)


class KeyQueue:
    """First-in first-out ring of image keys, text keys and ids, MoCo's dynamic dictionary.

    Every rank pushes the same gathered keys and holds the same queue. Size 0 is no queue.
    """

    # No `nn.Module`, so that a task does not register it as a part of the student.
    def __init__(self, size: int, dim: int) -> None:
        if size < 0:
            raise ValueError(f"a queue has at least 0 keys, not {size}")
        self.size = size
        self.image = torch.zeros(size, dim)
        self.text = torch.zeros(size, dim)
        self.pair_ids = torch.full((size, 2), -1)
        # 0-d tensors, so that no push needs a synchronisation.
        self.pointer = torch.zeros((), dtype=torch.int64)
        self.filled = torch.zeros((), dtype=torch.int64)

    def to(self, device: torch.device | str) -> KeyQueue:
        """Move the keys to `device`."""
        for name in _STATE.values():
            setattr(self, name, getattr(self, name).to(device))
        return self

    def keys(self) -> Keys:
        """Return the keys in the queue, as views that the next `push` overwrites."""
        # On a GPU, reading their number would be a synchronisation: return empty rows, too.
        end = self.size if off_cpu(self.image) else int(self.filled)
        valid = torch.arange(end, device=self.image.device) < self.filled
        return Keys(self.image[:end], self.text[:end], self.pair_ids[:end], valid)

    @torch.no_grad()
    def push(self, image: Tensor, text: Tensor, pair_ids: Tensor, valid: Tensor) -> None:
        """Replace the oldest keys by the last `size` of the keys of all ranks.

        Args:
            image, text: (R, dim); rows that are not finite are left out.
            pair_ids: (R, 2) int64, ids of image and caption, or (R,) of images.
            valid: (R,) bool; other rows are left out.
        """
        # A queue of the student's own past features destroys the contrastive loss: R@1 below 1 %.
        if image.requires_grad or text.requires_grad:
            raise ValueError("the queue takes the teacher's keys only, not the student's features")
        if self.size == 0:
            return
        queue = self.image, self.text, self.pair_ids
        self.pointer, self.filled = _overwrite_oldest(
            queue, (image, text, as_pairs(pair_ids)), valid, self.pointer, self.filled
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys, ids, pointer and number of keys."""
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
