"""Tensors of one model copied into another, once everything has been checked, and a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class LoadReport(NamedTuple):
    """Report of a weight copy: the outcome for the tensors of both sides.

    matched and resized: names of target tensors; missing: parts of the target that keep their own
    start, `*` standing for every layer; unused: source keys; notes: values that were changed.
    """

    source: str
    matched: list[str]
    resized: list[str]
    missing: list[str]
    unused: list[str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for the log."""
        parts = [f"{len(self.matched)} matched", f"{len(self.resized)} resized"]
        if self.missing:
            parts.append(f"{len(self.missing)} keep their own start ({', '.join(self.missing)})")
        parts += [f"{len(self.unused)} not used", *self.notes]
        return f"{self.source}: {'; '.join(parts)}"


def copy_weights(
    module: nn.Module,
    found: Mapping[str, Tensor],
    source: str,
    unused: list[str],
    may_miss: tuple[str, ...],
) -> LoadReport:
    """Copy tensors into a module once everything has been checked.

    Args:
        module: the target.
        found: tensors by the target's names.
        source: where they come from, for messages and the report.
        unused: source keys that are declared as unused.
        may_miss: patterns of the names' beginnings that may keep their own start; the first one
            that matches names the part in the report.

    Raises:
        ValueError: a name without a place, a target that nothing fills, or shapes that differ.
    """
    target = module.state_dict()
    unknown = sorted(set(found) - set(target))
    if unknown:
        raise ValueError(f"{source}: these keys have no place here: {listed(unknown)}")
    lost, kept = [], set()
    for name in target:
        if name not in found:
            match = next(filter(None, (re.match(part, name) for part in may_miss)), None)
            if match:
                kept.add(re.sub(r"\.\d+\.", ".*.", match[0]).rstrip("."))
            else:
                lost.append(name)
    if lost:
        raise ValueError(f"{source}: these weights are missing: {listed(lost)}")
    for name, tensor in found.items():
        if tensor.shape != target[name].shape:
            raise ValueError(
                f"{source}: {name} is {tuple(tensor.shape)} there and "
                f"{tuple(target[name].shape)} here"
            )
        if target[name].is_floating_point() and not tensor.is_floating_point():
            raise ValueError(f"{source}: {name} is {_kind(tensor)} there, not a float")
    with torch.no_grad():
        for name, tensor in found.items():
            target[name].copy_(tensor)
    other = {
        (_kind(tensor), _kind(target[name]))
        for name, tensor in found.items()
        if tensor.dtype != target[name].dtype
    }
    notes = tuple(f"{there} there, {here} here" for there, here in sorted(other))
    return LoadReport(source, sorted(found), [], sorted(kept), unused, notes)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message, the first ones and a count where they are many."""
    further = len(names) - most
    return ", ".join(names[:most]) + (f" and {further} more" if further > 0 else "")


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
