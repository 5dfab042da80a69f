"""The weights that autocast takes in half precision, and casts in every call where none is kept."""

from __future__ import annotations

from collections import Counter

from torch import nn

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
