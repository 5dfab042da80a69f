"""Encoders of which a part is trained: the last blocks of the tower, or none."""

from __future__ import annotations

import re
from typing import ClassVar, Self

from torch import nn

from vlp.config import ConfigError
from vlp.models.config import Trainable


class TrainableTower(nn.Module):
    """Base of both encoders: a tower of blocks, and an adapter and a projection after it.

    Subclasses set `blocks`, the dotted name of the list of blocks, and call `restrict`. A tower
    that is frozen as a whole stays in evaluation mode.
    """

    AFTER: ClassVar[tuple[str, ...]] = ("projection", "adapter")
    blocks: str
    frozen: bool = False

    @property
    def depth(self) -> int:
        """Return the number of blocks."""
        return len(self.get_submodule(self.blocks))  # type: ignore[arg-type]

    def layer_distances(self) -> dict[str, int]:
        """Return how far each parameter of the tower lies below its top, by name.

        Norms after the last block have 0, the last block 1, the one before 2, embeddings and the
        encodings of tokens, norms within them included, one more than the first block (the layer
        ids of BEiT's layer-wise rates, counted from the top).
        """
        block = re.compile(rf"{re.escape(self.blocks)}\.(\d+)\.")
        distances: dict[str, int] = {}
        for name, _ in self.named_parameters():
            if name.startswith(self.AFTER):
                continue
            if within := block.match(name):
                distances[name] = self.depth - int(within[1])
            else:
                is_norm = "norm" in name.lower() and "positions." not in name
                is_top = is_norm and 1 in distances.values()
                distances[name] = 0 if is_top else self.depth + 1
        return distances

    def restrict(self, trainable: Trainable, key: str) -> None:
        """Freeze all of the tower but its last `trainable` blocks and the norms after them.

        Raises:
            ConfigError: the tower has fewer blocks; `key` names the setting.
        """
        if trainable == "all":
            return
        if trainable > self.depth:
            raise ConfigError(f"{key} is {trainable}, and the tower has {self.depth} blocks")
        parameters = dict(self.named_parameters())
        for name, distance in self.layer_distances().items():
            parameters[name].requires_grad_(trainable > 0 and distance <= trainable)
        self.frozen = trainable == 0
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but a frozen tower."""
        super().train(mode)
        for name, child in self.named_children():
            if self.frozen and name not in self.AFTER:
                child.eval()
        return self
