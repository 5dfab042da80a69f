"""Outcomes of optimiser steps, of which a GPU's are read many at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from vlp.tasks.task import StepOutput
from vlp.training.engines.base import Update


class Outcome(NamedTuple):
    """Optimiser step number `step`, from 1: outputs of its micro-steps, and what became of it."""

    step: int
    outputs: list[StepOutput]
    update: Update


def on_cpu(outcomes: list[Outcome]) -> list[Outcome]:
    """Return outcomes with their numbers on the CPU, for which the device is waited for once."""
    leaves, form = tree_flatten(outcomes)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_cuda]
    if places:
        numbers = torch.stack([leaves[place].float() for place in places]).cpu()
        for place, number in zip(places, numbers):
            leaves[place] = number
    read: list[Outcome] = tree_unflatten(leaves, form)
    return read
