"""Weights that compute in bf16, and the float32 masters that an optimiser moves.

Autocast casts a float32 weight to bf16 at each step, and its gradient back. A weight kept in bf16
is multiplied as it is, so products under autocast have the same bits. Its update is often smaller
than what bf16 can add, so AdamW moves a float32 copy, which alone is saved.
"""

from __future__ import annotations

import torch
from torch import nn

from vlp import distributed
from vlp.compute.half_weights import RoundedWeights, half_weights


class Masters(RoundedWeights):
    """Float32 masters of the trained weights of a module's linear and convolutional layers.

    A weight that another module reads too, such as a table of words, stays float32.
    """

    @torch.no_grad()
    def take(self, module: nn.Module) -> None:
        """Cast a module's weights to bf16 in place; every rank keeps rank 0's as masters."""
        trained = {name: p for name, p in half_weights(module).items() if p.requires_grad}
        for weight in trained.values():
            weight.copy_(distributed.tensor_from_rank_0(weight.detach().cpu().contiguous()))
        self.keep(trained, torch.bfloat16)

    def replace(self, optimiser: torch.optim.Optimizer) -> None:
        """Have an optimiser move masters in place of their weights."""
        of = {id(weight): self._masters[name] for name, weight in self._weights.items()}
        for group in optimiser.param_groups:
            group["params"] = [of.get(id(p), p) for p in group["params"]]

    def take_gradients(self) -> None:
        """Move the weights' gradients to their masters, in float32."""
        given, taken = [], []
        for name, weight in self._weights.items():
            if weight.grad is not None:
                given.append(weight.grad)
                taken.append(torch.empty_like(self._masters[name]))
                self._masters[name].grad, weight.grad = taken[-1], None
        if given:
            torch._foreach_copy_(taken, given)
