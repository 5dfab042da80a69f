"""A self-contained HTML page of runs: results, curves, example retrievals and anchors."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluation.downstream.task_evaluation import get_evaluation, load_model
from evaluation.grounding.heatmaps import data_uri, draw_boxes, overlay_anchors
from evaluation.options import EvalOptions
from evaluation.probes.anchor_maps import map_caption
from evaluation.report.sources import Source, StoredResult, settings, training_summary
from evaluation.results import Table, merge_notes
from evaluation.retrieval.gallery import Gallery
from evaluation.retrieval.rerank import search
from evaluation.samples import EvaluationError, format_kinds
from evaluation.work_sharding import evaluating
from vlp.config import ConfigError
from vlp.data.schema import Annotation
from vlp.tasks.downstream.registry import task_kinds

# Images of an example retrieval.
HITS = 3
ANCHORS = (
    "Small images: share of channel groups in which each patch anchors the word, from dark for few "
    "to yellow for all."
)
STYLE = """
body { margin: 0 auto; max-width: 76rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h2 { border-bottom: 2px solid #d5d9de; } figure { margin: 0; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { padding: .3rem .6rem; border-top: 1px solid #d5d9de; text-align: right; }
th:first-child, .facts td { text-align: left; }
.note, figcaption { color: #565c64; font-size: .85rem; }
.row { display: flex; flex-wrap: wrap; gap: .8rem; margin: .5rem 0 1.5rem; }
.row figure { max-width: 15rem; } .row figure.curve { max-width: 24rem; }
img { max-width: 100%; height: auto; }
"""
CURVES = ("loss", "validation", "learning_rate", "samples_per_second")
_PROBES = {
    "pointing": "Pointing of words",
    "swaps": "Swapped arrangements (generated corpus)",
    "foils": "Captions with one thing exchanged",
    "vision": "Vision models",
}


class Html(str):
    """Markup; every other string is text, which `element` escapes."""


def element(name: str, *children: str, **attributes: str) -> Html:
    """Return an HTML element, text and attributes escaped; `class_` sets the attribute `class`."""
    content = "".join(c if isinstance(c, Html) else html.escape(c) for c in children)
    attributes_text = "".join(f' {k.rstrip("_")}="{html.escape(v)}"' for k, v in attributes.items())
    return Html(
        f"<{name}{attributes_text}>" + ("" if name in ("img", "meta") else f"{content}</{name}>")
    )


def page(
    sources: Sequence[Source],
    shards: Sequence[str | Path] = (),
    *,
    cases: int = 6,
    options: EvalOptions = EvalOptions(limit=1000),
) -> str:
    """Return a self-contained page, with `cases` best and as many worst retrievals on `shards`."""
    title = f"Report: {', '.join(source.name for source in sources)}"
    tables = [element("h3", table.title) + _table(table) for table in result_tables(sources)]
    parts = [
        element("h1", title),
        element("h2", "Results"),
        *(tables or [element("p", "None of these folders holds results.")]),
    ]
    # One figure for all runs, so that losses can be compared; a log may lack the total.
    losses = {s.name: line for s in sources if (line := _line(s.log, "loss/total"))}
    if len(losses) > 1:
        parts += [_row([_curve("Total loss", losses)])]
    for number, source in enumerate(sources, 1):
        parts += [element("h2", source.name, id=f"run{number}")]
        parts += _run_section(source, shards, cases, options)
    head = Html('<meta charset="utf-8">') + element("title", title) + element("style", Html(STYLE))
    body = element("body", Html("".join(parts)))
    return f'<!DOCTYPE html>\n<html lang="en">{element("head", Html(head))}{body}</html>\n'


def result_tables(sources: Sequence[Source]) -> list[Table]:
    """Return a table for each kind of result of any run, downstream tasks first."""
    kinds = dict.fromkeys(result.kind for source in sources for result in source.results)
    ordered = [kind for kind in (*task_kinds(), *_PROBES) if kind in kinds]
    return [_result_table(kind, sources) for kind in dict.fromkeys([*ordered, *kinds])]


def _result_table(kind: str, sources: Sequence[Source]) -> Table:
    task = get_evaluation(kind) if kind in task_kinds() else None
    rows = [
        (f"{source.name}, {variant}" if variant else source.name, figures)
        for source, result in _of_kind(kind, sources)
        for variant, figures in result.variants.items()
    ]
    available = dict.fromkeys(name for _, figures in rows for name in figures)
    leading = [name for name in (task.columns if task else ()) if name in available]
    names = list(dict.fromkeys([*leading, *available]))
    lines = [
        [label, *(figures[name].percent() if name in figures else "" for name in names)]
        for label, figures in rows
    ]
    # A row for each distinct chance level: evaluations on the same items have the same.
    chances = dict.fromkeys(
        tuple(figures[name].chance_percent() if name in figures else "" for name in names)
        for _, figures in rows
    )
    lines += [["chance", *cells] for cells in chances if any(cells)]
    notes = []
    if any(figure.low < figure.high for _, figures in rows for figure in figures.values()):
        notes.append("Percent; in brackets 95 % bootstrap intervals over images.")
    for source, result in _of_kind(kind, sources):
        counts = ", ".join(f"{count} {name}" for name, count in result.counts.items())
        origin = f" of {' + '.join(result.shards)}" if result.shards else ""
        skipped = f"; skipped {format_kinds(result.skipped)}" if result.skipped else ""
        notes += [f"{source.name}: {counts}{origin}{skipped}."] if counts + origin + skipped else []
    notes += merge_notes({source.name: result.notes for source, result in _of_kind(kind, sources)})
    return Table(task.title if task else _PROBES.get(kind, kind), ["", *names], lines, notes)


def _of_kind(kind: str, sources: Sequence[Source]) -> list[tuple[Source, StoredResult]]:
    return [
        (source, result) for source in sources for result in source.results if result.kind == kind
    ]


def _run_section(
    source: Source, shards: Sequence[str | Path], cases: int, options: EvalOptions
) -> Iterator[Html]:
    """Yield the elements of one run."""
    yield element("p", f"{source.folder} {source.task or ''}", class_="note")
    facts = [*settings(source), *training_summary(source)]
    cells = (element("tr", element("th", k), element("td", v)) for k, v in facts)
    yield element("table", *cells, class_="facts")
    yield _row([_curve(title, lines) for title, lines in training_curves(source.log).items()])
    if shards and cases and source.model and not source.task:
        yield from _examples(source, shards, cases, options)
    # Last, as `_examples` may add problems.
    yield from (element("p", f"Problem: {note}.", class_="note") for note in source.problems)


def _examples(
    source: Source, shards: Sequence[str | Path], cases: int, options: EvalOptions
) -> list[Html]:
    """Return example retrievals of the run's model; errors are added to `source.problems`."""
    try:
        gallery = Gallery(load_model(str(source.model)), shards, options)
        title = element("h3", f"Examples: retrieval among {len(gallery)} images")
        return [title, element("p", ANCHORS, class_="note"), *retrieval_cases(gallery, cases)]
    except (EvaluationError, FileNotFoundError) as error:
        source.problems.append(f"no examples ({error})")
        return []
    except ConfigError as error:
        raise ConfigError(f"--shards: {error}") from error


def retrieval_cases(gallery: Gallery, count: int) -> Iterator[Html]:
    """Yield retrieved images of `count` captions with the worst ranks and `count` with the best."""
    collection = gallery.collection
    image_of_text = collection.image_of_text
    dual = search(collection.text_features, collection.image_features, image_of_text[:, None], HITS)
    order = np.argsort(dual.ranks, kind="stable")
    for title, queries in (("Worst", order[::-1]), ("Best", order)):
        yield element("h4", f"{title}, text → image")
        # The first caption of each image.
        _, first = np.unique(image_of_text[queries], return_index=True)
        for query in queries[np.sort(first)[:count]]:
            target, caption = gallery.image(int(image_of_text[query])), collection.captions[query]
            rank_text = f"rank of its image: {dual.ranks[query] + 1} of {len(gallery)}"
            images = [(draw_boxes(target.image), f"its image; {rank_text}")]
            nearest = zip(dual.nearest[query], dual.similarities[query])
            for rank, (image, similarity) in enumerate(nearest, 1):
                label = f"rank {rank}, similarity {similarity:.2f}"
                images.append((draw_boxes(gallery.image(int(image)).image), label))
            yield element("p", caption)
            yield _images(images)
            # Anchors of the words in the caption's image.
            sample = target._replace(captions=[caption], annotation=Annotation())
            with evaluating(gallery.loaded.model, gallery.encoder.device) as device:
                words = map_caption(gallery.loaded, sample, device).words
            yield _images([(overlay_anchors(target.image, word.heat), word.word) for word in words])


def training_curves(log: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return curves {title: {label: points}} of losses, validation, learning rate and speed."""
    curves: dict[str, dict[str, Any]] = {}
    for name in sorted({name for row in log for name in row}):
        title, _, label = name.partition("/")
        if title in CURVES and "/" not in label:
            curves.setdefault(title.replace("_", " "), {})[label or title] = _line(log, name)
    return curves


def _line(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) points; NaN, a gap in the curve, for a value that is not a number."""
    points = []
    for row in log:
        if name in row:
            is_number = isinstance(row[name], int | float) and math.isfinite(row[name])
            points.append((row["step"], float(row[name]) if is_number else math.nan))
    return points


def _curve(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> Html:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(4, 3), layout="constrained")
    axes = canvas.add_subplot(title=title, xlabel="step")
    for label, points in lines.items():
        # Matplotlib reads dollar signs as a formula and leaves out labels that begin with "_".
        legend = label.replace("$", r"\$").lstrip("_") or " "
        axes.plot(*zip(*points), marker=".", markersize=2, linewidth=1, label=legend)
    axes.legend(fontsize=7)
    file = BytesIO()
    canvas.savefig(file, format="svg", metadata={"Date": None})
    address = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
    summary = ", ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in lines.items())
    image = element("img", src=address, alt=f"{title} against steps: {summary}")
    return element("figure", image, element("figcaption", summary), class_="curve")


def _images(captioned: Sequence[tuple[Image.Image, str]]) -> Html:
    """Return images with captions, which are also their alternative texts."""
    images = ((element("img", src=data_uri(image), alt=text), text) for image, text in captioned)
    return _row([element("figure", image, element("figcaption", text)) for image, text in images])


def _row(parts: Sequence[Html]) -> Html:
    return element("div", *parts, class_="row")


def _table(table: Table) -> Html:
    head = element("tr", *(element("th", cell) for cell in table.head))
    rows = (
        element("tr", element("th", row[0]), *(element("td", cell) for cell in row[1:]))
        for row in table.rows
    )
    notes = (element("p", note, class_="note") for note in table.notes)
    return Html(element("table", head, *rows) + "".join(notes))
