"""Exact matches on the test pairs of ARC tasks, as they are and in held-out variants."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch

from evaluation.options import EvalOptions
from evaluation.samples import evenly_spread
from evaluation.work_sharding import evaluating, inference
from vlp.tasks.grids.arc import GridPair, GridVariant, held_out_variants
from vlp.tasks.grids.data import GridDataConfig, GridSample, collate_grids, grid_sample, open_grids
from vlp.tasks.grids.task import Grids, question_of

# Tokens of one batch.
TOKENS = 2**14


class _Question(NamedTuple):
    """One question: its task, whether it is a variant, and the pair as tensors."""

    name: str
    varied: bool
    sample: GridSample


def evaluate(task: Grids, options: EvalOptions) -> dict[str, float]:
    """Compute the percent of templates that greedy decoding gets wholly right, border included.

    `original/TASK` is of the unmodified test pairs, `exact/TASK` of `data.variants` variants of
    each that training never draws (missing if the symmetry allows no such variants); `original` and
    `exact` are the means over tasks. Training has no test pair in any variant.
    """
    config = task.config.data
    questions = _questions(config)
    selection = [questions[number] for number in evenly_spread(len(questions), options.limit)]
    batch_size = max(1, TOKENS // (config.size + 1) ** 2)
    hits_by_kind: dict[str, dict[str, list[bool]]] = {
        "exact": defaultdict(list),
        "original": defaultdict(list),
    }
    with evaluating(task, options.device) as torch_device, torch.no_grad():
        for first in range(0, len(selection), batch_size):
            part = selection[first : first + batch_size]
            batch = collate_grids(config.size, [question.sample for question in part]).to(
                torch_device
            )
            # Greedy decoding gives a template if each of its tokens is the likeliest after those
            # before it, so that one pass over the template itself is enough.
            with inference(torch_device, options.precision or "float32"):
                likeliest = task.model(question_of(batch), batch.outputs).argmax(-1)
            for question, hit in zip(
                part, (likeliest == batch.outputs).all(-1).tolist(), strict=True
            ):
                hits_by_kind["exact" if question.varied else "original"][question.name].append(hit)
    figures = {}
    for kind, tasks in hits_by_kind.items():
        shares = {name: 100 * sum(hits) / len(hits) for name, hits in tasks.items()}
        if shares:
            figures[kind] = sum(shares.values()) / len(shares)
        figures |= {f"{kind}/{name}": share for name, share in shares.items()}
    return figures


def _questions(config: GridDataConfig) -> list[_Question]:
    """Return the questions, the same for every model of one configuration."""
    tasks = open_grids(config)
    questions = []
    for number, grid_task in enumerate(config.tasks):
        variants = held_out_variants(grid_task.allowed, config.variants, np.random.default_rng(0))
        for pair in tasks[grid_task.name].test:
            for variant in (GridVariant(), *variants):
                transformed = GridPair(variant(pair.input), variant(pair.output))
                sample = grid_sample(transformed, number, config.size)
                questions.append(_Question(grid_task.name, variant != GridVariant(), sample))
    return questions
