"""Anchors of captions and maps of expressions, as images for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation.grounding.heatmaps import (
    OWN_BOX,
    Drawn,
    anchors_over,
    framed,
    heat_over,
    phrase_heat,
)
from evaluation.html_report.cases import Case, ReportCase
from evaluation.probes.anchor_maps import AnchorMap, anchor_maps
from evaluation.samples import CaptionedSample, EvaluationError, Samples
from vlp.models.folder import Loaded

SEARCHED = 200
"""So many samples are looked at for one with expressions."""


class AnchorRow(NamedTuple):
    """A caption, its image, and a small map for each word."""

    caption: str
    image: ReportCase
    words: list[ReportCase]
    threshold: float


def anchor_rows(
    loaded: Loaded,
    shards: Sequence[str | Path],
    count: int,
    device: torch.device | str | None = None,
) -> list[AnchorRow]:
    """Anchors of the first captions of the shards, as `python -m evaluation anchors` draws them.

    Raises:
        EvaluationError: no sample has a caption.
        ConfigError: a shard folder cannot be read.
    """
    return [anchor_row(one) for one in anchor_maps(loaded, shards, count=count, device=device)]


def anchor_row(found: AnchorMap) -> AnchorRow:
    """Draw the images of one caption; a green frame is the box that a word names, where known."""
    words = []
    for word in found.words:
        boxes: list[Drawn] = [(box, OWN_BOX) for box in word.boxes]
        words.append(ReportCase(anchors_over(found.image, word.heat, boxes), word.word))
    image = ReportCase(framed(found.image, (), 128), "the image")
    return AnchorRow(found.caption, image, words, found.threshold)


def expression_maps(
    loaded: Loaded,
    shards: Sequence[str | Path],
    count: int,
    device: torch.device | str | None = None,
) -> list[Case]:
    """Grad-CAM maps of the first expression of the first samples that have any.

    Raises:
        EvaluationError: none of the first samples has expressions.
        ConfigError: a shard folder cannot be read.
    """
    samples, cases = Samples(shards), []
    for place in range(min(len(samples), SEARCHED)):
        sample = samples.read(place)
        if isinstance(sample, CaptionedSample) and sample.annotation.expressions:
            expression = sample.annotation.expressions[0]
            boxes: list[Drawn] = [(expression.box, OWN_BOX)]
            heat = phrase_heat(loaded, sample.image, expression.text, device=device)
            shown = [
                ReportCase(framed(sample.image, boxes), "green: the box meant"),
                ReportCase(
                    heat_over(sample.image, heat, boxes), f"Grad-CAM of “{expression.text}”"
                ),
            ]
            cases.append(Case([("expression", expression.text)], shown))
        if len(cases) == count:
            break
    if not cases:
        raise EvaluationError(
            f"{', '.join(samples.folders)}: none of the first {SEARCHED} samples has expressions"
        )
    return cases
