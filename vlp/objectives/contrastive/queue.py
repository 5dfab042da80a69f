"""The queue of past keys that the contrastive loss compares with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class QueueKeys(NamedTuple):
    """Pairs in the queue: `image`, `text` (filled, dim) and `image_ids` (filled,)."""

    image: Tensor
    text: Tensor
    image_ids: Tensor


class KeyQueue:
    """First-in first-out ring of (image key, text key, image id), MoCo's dynamic dictionary.

    Only ever filled with the momentum teacher's keys: a queue of the student's own past features
    destroys the contrastive loss (R@1 below 1 % in a trial), so keys that carry a gradient
    are refused. Every rank pushes the same gathered keys and therefore holds the same queue. Like
    `Teacher` it is no `nn.Module`, so its holder does not register it. Size 0 is no queue.

    Raises:
        ValueError: a negative size.
    """

    def __init__(self, size: int, dim: int, device: torch.device | str = "cpu") -> None:
        if size < 0:
            raise ValueError(f"a queue cannot hold {size} keys")
        self.size = size
        self.image = torch.zeros(size, dim, device=device)
        self.text = torch.zeros(size, dim, device=device)
        self.image_ids = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.pointer = 0
        self.filled = 0

    def to(self, device: torch.device | str) -> KeyQueue:
        """Move the keys to `device`."""
        self.image = self.image.to(device)
        self.text = self.text.to(device)
        self.image_ids = self.image_ids.to(device)
        return self

    def keys(self) -> QueueKeys:
        """Return the keys in the queue, as views that the next `push` overwrites.

        A loss must concatenate (copy) them before its backward pass meets another push.
        """
        end = self.filled
        return QueueKeys(self.image[:end], self.text[:end], self.image_ids[:end])

    @torch.no_grad()
    def push(
        self, image: Tensor, text: Tensor, image_ids: Tensor, valid: Tensor | None = None
    ) -> None:
        """Append keys of all ranks, (R, dim), (R, dim), (R,); the oldest make room.

        Rows with `valid` (R,) False are left out, and so are keys that are not finite, which would
        spoil every step until they are overwritten. Of more rows than the queue holds, the last
        stay.

        Raises:
            ValueError: the keys carry a gradient, so they are not the teacher's.
        """
        if image.requires_grad or text.requires_grad:
            raise ValueError("the queue takes the teacher's keys only, not the student's features")
        if self.size == 0:
            return
        kept = image.isfinite().all(-1) & text.isfinite().all(-1)
        if valid is not None:
            kept &= valid
        image, text, image_ids = image[kept], text[kept], image_ids[kept]
        number = image.shape[0]
        dropped = max(0, number - self.size)
        place = torch.arange(dropped, number, device=self.image.device)
        place = (place + self.pointer) % self.size
        self.image[place] = image[dropped:].to(self.image)
        self.text[place] = text[dropped:].to(self.text)
        self.image_ids[place] = image_ids[dropped:].to(self.image_ids)
        self.pointer = (self.pointer + number) % self.size
        self.filled = min(self.size, self.filled + number)

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys, ids and the ring's position as tensors, for the checkpoint."""
        return {
            "image": self.image,
            "text": self.text,
            "image_ids": self.image_ids,
            "pointer": torch.tensor(self.pointer),
            "filled": torch.tensor(self.filled),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            ValueError: the state is of a queue of another size or width.
        """
        if state["image"].shape != self.image.shape:
            raise ValueError(
                f"the checkpoint's queue is {tuple(state['image'].shape)}, "
                f"this one {tuple(self.image.shape)}"
            )
        self.image.copy_(state["image"])
        self.text.copy_(state["text"])
        self.image_ids.copy_(state["image_ids"])
        self.pointer = int(state["pointer"])
        self.filled = int(state["filled"])
