"""The weights that autocast takes in half precision, and casts in every call where none is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv2d)


def half_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module's linear and convolutional layers, by name.

    One that another module reads too, such as a table of words, is not among them.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in named)
    own = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, LAYERS)
        for parameter in layer.parameters(recurse=False)
    }
    return {name: weight for name, weight in named if uses[id(weight)] == 1 and id(weight) in own}


class RoundedWeights:
    """Weights that a module holds in half precision, and their float32 masters beside it."""

    def __init__(self) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}

    def keep(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Round weights in place, by name; what they held is their masters from here on."""
        for name, weight in weights.items():
            self._weights[name], self._masters[name] = weight, weight.data
            weight.data = weight.data.to(dtype)

    def held(self) -> dict[str, Tensor]:
        """Return the masters by the names of their weights."""
        return dict(self._masters)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters to their weights."""
        if self._weights:
            torch._foreach_copy_(list(self._weights.values()), list(self._masters.values()))

    def to(self, device: torch.device) -> None:
        """Move the masters; the module moves its weights."""
        self._masters = {name: master.to(device) for name, master in self._masters.items()}
