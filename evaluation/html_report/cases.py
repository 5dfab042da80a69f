"""Best and worst predictions of a model, with images and the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from evaluation.downstream.registry import get_evaluation
from evaluation.downstream.task_evaluation import TaskEvaluation
from evaluation.grounding.heatmaps import CHOSEN_BOX, OWN_BOX, Drawn, framed, heat_over, phrase_heat
from evaluation.html_report.sources import StoredResult
from evaluation.results import read_lines
from evaluation.retrieval.gallery import Gallery
from evaluation.retrieval.rerank import search
from evaluation.samples import EvaluationError, images_of, samples_of
from vlp.data.shards.sample_files import RawSample
from vlp.models.folder import Loaded

Row = Mapping[str, Any]

FOUND = 3
"""Number of other results shown for a search."""


class ReportCase(NamedTuple):
    """An image and what is to be read where it cannot be seen."""

    image: Image.Image
    text: str


class Case(NamedTuple):
    """One item: labelled texts of one line or more, its images, and what was found instead."""

    lines: list[tuple[str, str]]
    images: list[ReportCase]
    found: Sequence[ReportCase] = ()


class CaseGroup(NamedTuple):
    """Cases under one heading."""

    title: str
    cases: list[Case]
    note: str = ""


def task_cases(
    result: StoredResult,
    shards: Sequence[str | Path],
    count: int,
    loaded: Loaded | None = None,
    device: torch.device | str | None = None,
) -> list[CaseGroup]:
    """Return the worst and best items of a task's result, their images from the shards.

    Args:
        result: with predictions.
        shards: where its items lie.
        count: cases of each group.
        loaded: draws the maps of expressions; without it only boxes are drawn.
        device: of the model.

    Raises:
        EvaluationError: there are no predictions, none has scores, or none is of these shards.
        ConfigError: a shard folder cannot be read.
    """
    if result.predictions is None:
        raise EvaluationError(f"{result.file}: no {result.file.stem}.predictions.jsonl beside it")
    rows = read_lines(result.predictions)
    evaluation = get_evaluation(result.kind)
    score = next(
        (name for name in evaluation.case_scores for row in rows if name in row.get("scores", ())),
        None,
    )
    if score is None:
        raise EvaluationError(f"{result.predictions}: none of its items has a score")
    scored = [row for row in rows if score in row.get("scores", ())]
    groups = []
    for title, chosen in (
        ("Worst", _extreme(scored, score, count, worst=True)),
        ("Best", _extreme(scored, score, count, worst=False)),
    ):
        raws = samples_of(chosen, shards, evaluation.fits)
        cases = [
            _case(evaluation, row, raw, score, loaded, device)
            for row, raw in zip(chosen, raws)
            if raw is not None
        ]
        lost = len(chosen) - len(cases)
        note = f"{lost} of {len(chosen)} were not found in the shards." if lost else ""
        groups.append(CaseGroup(f"{title} by {score}", cases, note))
    if not any(group.cases for group in groups):
        raise EvaluationError(
            f"{', '.join(map(str, shards))}: holds none of the items of {result.predictions}"
        )
    return [group for group in groups if group.cases or group.note]


def retrieval_cases(gallery: Gallery, count: int) -> list[CaseGroup]:
    """Return queries whose right answer the dual encoder ranks last, and first."""
    collection = gallery.collection
    by_text = search(collection.text, collection.image, collection.image_of_text[:, None], FOUND)
    by_image = search(collection.image, collection.text, collection.texts_of_image(), FOUND)
    owners = collection.image_of_text
    images = len(gallery)

    def text_case(query: int) -> Case:
        own = int(owners[query])
        return Case(
            [
                ("text", collection.captions[query]),
                ("rank of its image", f"{by_text.ranks[query] + 1} of {images}"),
            ],
            [_shown(gallery, own, "its image")],
            [
                _shown(gallery, int(found), f"found at place {place}, similarity {value:.2f}")
                for place, (found, value) in enumerate(
                    zip(by_text.nearest[query], by_text.scores[query]), 1
                )
            ],
        )

    def image_case(query: int) -> Case:
        found = [collection.captions[text] for text in by_image.nearest[query]]
        return Case(
            [
                ("its texts", "\n".join(gallery.image(query).captions)),
                ("rank of the first", f"{by_image.ranks[query] + 1} of {len(owners)}"),
                *((f"found at place {place}", text) for place, text in enumerate(found, 1)),
            ],
            [_shown(gallery, query, "the image asked about")],
        )

    groups = []
    for arrow, ranks, owner, make in (
        ("text → image", by_text.ranks, owners, text_case),
        ("image → text", by_image.ranks, np.arange(images), image_case),
    ):
        order = np.argsort(ranks, kind="stable")
        for title, queries in (("Worst", order[::-1]), ("Best", order)):
            chosen = _of_different(queries.tolist(), owner, count)
            groups.append(CaseGroup(f"{title}, {arrow}", [make(query) for query in chosen]))
    return groups


def _of_different(queries: Sequence[int], owner: Any, count: int) -> list[int]:
    """Return the first queries of different images."""
    chosen: dict[int, int] = {}
    for query in queries:
        if len(chosen) == count:
            break
        chosen.setdefault(int(owner[query]), query)
    return list(chosen.values())


def _shown(gallery: Gallery, number: int, text: str) -> ReportCase:
    return ReportCase(framed(gallery.image(number).image), text)


def _extreme(rows: Sequence[Row], score: str, count: int, worst: bool) -> list[Row]:
    """Rows with the lowest or highest scores; of many equal ones some from all over the set."""
    side = -1 if worst else 1
    ordered = sorted(rows, key=lambda row: -side * row["scores"][score])
    edge = ordered[0]["scores"][score]
    equal = [row for row in ordered if row["scores"][score] == edge]
    if len(equal) > count:
        places = np.linspace(0, len(equal) - 1, count).round().astype(int)
        return [equal[place] for place in places]
    return ordered[:count]


def _case(
    evaluation: TaskEvaluation,
    row: Row,
    raw: RawSample,
    score: str,
    loaded: Loaded | None,
    device: torch.device | str | None,
) -> Case:
    try:
        images = images_of(raw)
    except EvaluationError as error:
        return Case([("image", str(error))], [])
    lines = [*evaluation.lines(row, raw.annotation), (score, f"{row['scores'][score]:.3g}")]
    if evaluation.draws_maps:
        box = evaluation.box(row, raw.annotation)
        return Case(lines, _grounded(row, box, images[0], loaded, device))
    sides = [""] if len(images) == 1 else [", left", ", right"]
    return Case(
        lines,
        [ReportCase(framed(image), f"image {raw.key}{side}") for image, side in zip(images, sides)],
    )


def _grounded(
    row: Row,
    box: Sequence[float] | None,
    image: Image.Image,
    loaded: Loaded | None,
    device: torch.device | str | None,
) -> list[ReportCase]:
    boxes: list[Drawn] = [(box or (0, 0, 0, 0), OWN_BOX)]
    words = "green: the box meant"
    if row.get("box"):
        boxes.append((row["box"], CHOSEN_BOX))
        words += ", pink: the box chosen"
    shown = [ReportCase(framed(image, boxes), words)]
    if loaded is not None:
        heat = phrase_heat(loaded, image, str(row["text"]), device=device)
        shown.append(ReportCase(heat_over(image, heat, boxes), f"Grad-CAM of “{row['text']}”"))
    return shown
