"""Parameters exempt from weight decay, as the modules that own them declare."""

from __future__ import annotations

from torch import nn


def no_weight_decay(model: nn.Module, with_own: bool = True) -> set[str]:
    """Collect what `no_weight_decay()` of a model's modules says, by name in the model.

    The method is timm's convention: it returns names of parameters relative to its module.

    Args:
        model: whose modules are asked.
        with_own: whether the model itself is asked, too.
    """
    found: set[str] = set()
    for place, module in model.named_modules():
        declared = getattr(module, "no_weight_decay", None)
        if callable(declared) and (place or with_own):
            found |= {f"{place}.{name}".removeprefix(".") for name in declared()}
    return found & {name for name, _ in model.named_parameters()}
