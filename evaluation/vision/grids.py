"""Exact matches on the test pairs of ARC tasks, unmodified and in held-out variants."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from evaluation.options import EvalOptions
from evaluation.samples import evenly_spaced
from evaluation.work_sharding import evaluating, evaluation_autocast
from vlp.precision import require_finite
from vlp.tasks.grids.arc import GridPair, GridVariant, held_out_variants
from vlp.tasks.grids.data import GridDataConfig, GridSample, collate_grids, grid_sample, open_grids
from vlp.tasks.grids.task import Grids

# Tokens of one batch.
TOKENS = 2**14


def evaluate(task: Grids, options: EvalOptions) -> dict[str, float]:
    """Compute the percent of output grids that greedy decoding gets wholly right, with borders.

    `original/TASK`: unmodified test pairs; `exact/TASK`: `data.variants` held-out variants of each
    test pair (missing if the symmetry allows no such variants); `original` and `exact`: means over
    tasks. Training has no test pair in any variant.
    """
    config = task.config.data
    questions = _questions(config)
    selection = [questions[index] for index in evenly_spaced(len(questions), options.limit)]
    batch_size = max(1, TOKENS // (config.size + 1) ** 2)
    hits_by_kind: dict[str, dict[str, list[bool]]] = {
        "exact": defaultdict(list),
        "original": defaultdict(list),
    }
    with evaluating(task, options.device) as torch_device, torch.no_grad():
        for start in range(0, len(selection), batch_size):
            keys, samples = zip(*selection[start : start + batch_size])
            batch = collate_grids(config.size, list(samples)).to(torch_device)
            # Greedy decoding returns the right grid if each right token is the likeliest after the
            # right tokens before it, so one teacher-forced pass is enough.
            with evaluation_autocast(torch_device, options.precision or "float32"):
                logits = task.model(batch, batch.outputs)
            hits = (require_finite(logits).argmax(-1) == batch.outputs).all(-1).tolist()
            for (kind, name), hit in zip(keys, hits, strict=True):
                hits_by_kind[kind][name].append(hit)
    figures = {}
    for kind, tasks in hits_by_kind.items():
        shares = {name: 100 * sum(task_hits) / len(task_hits) for name, task_hits in tasks.items()}
        if shares:
            figures[kind] = sum(shares.values()) / len(shares)
        figures |= {f"{kind}/{name}": share for name, share in shares.items()}
    return figures


def _questions(config: GridDataConfig) -> list[tuple[tuple[str, str], GridSample]]:
    """Return (kind, task) and test pair of each question; they depend on `config` alone."""
    tasks = open_grids(config)
    questions = []
    for number, grid_task in enumerate(config.tasks):
        # A fixed seed: all models get the same variants.
        variants = held_out_variants(
            grid_task.task_symmetry, config.variants, np.random.default_rng(0)
        )
        for pair in tasks[grid_task.name].test:
            for variant in (GridVariant(), *variants):
                transformed = GridPair(variant(pair.input), variant(pair.output))
                sample = grid_sample(transformed, number, config.size)
                kind = "original" if variant == GridVariant() else "exact"
                questions.append(((kind, grid_task.name), sample))
    return questions
