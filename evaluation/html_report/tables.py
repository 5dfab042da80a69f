"""Results of several runs side by side, the paper's rows among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from evaluation.ablations.paper_results import SOURCE, PaperTable, paper_tables, split_of
from evaluation.downstream.registry import get_evaluation
from evaluation.html_report.sources import Source, StoredResult
from evaluation.results import Figure, Table, attributed
from evaluation.samples import kinds_in_words
from vlp.tasks.downstream.registry import task_kinds

Paper = Literal["same", "all", "none"]
"""The paper's rows: on data of the same name, of the same task whatever the data, or none."""

WIDEST = 8
"""With more figures than so many, they are the rows, and the runs the columns."""

_PROBES = {
    "pointing": "Pointing of words",
    "swaps": "Swapped arrangements (generated corpus)",
    "foils": "Captions with one thing exchanged",
    "vision": "Vision models",
}
"""Titles of results that are of no downstream task."""


class ResultRow(NamedTuple):
    """One row of figures: of which run, and what was done."""

    run: str
    label: str
    result: StoredResult
    figures: dict[str, Figure]


def result_tables(sources: Sequence[Source], paper: Paper = "same") -> list[Table]:
    """Return one table for each kind that any run has results of, downstream tasks first."""
    found = dict.fromkeys(result.kind for source in sources for result in source.results)
    ordered = (*task_kinds(), *_PROBES)
    kinds = [*(kind for kind in ordered if kind in found), *(found.keys() - set(ordered))]
    return [_table(kind, list(_evaluated(sources, kind)), paper) for kind in kinds]


def title_of(kind: str) -> str:
    """Return the title of a kind of results."""
    return get_evaluation(kind).title if kind in task_kinds() else _PROBES.get(kind, kind)


def _evaluated(sources: Sequence[Source], kind: str) -> Iterator[ResultRow]:
    for source in sources:
        for result in source.results:
            if result.kind == kind:
                for variant, figures in result.variants.items():
                    label = f"{source.name}, {variant}" if variant else source.name
                    yield ResultRow(source.name, label, result, figures)


def _table(kind: str, rows: list[ResultRow], paper: Paper) -> Table:
    known = dict.fromkeys(name for row in rows for name in row.figures)
    first = get_evaluation(kind).columns if kind in task_kinds() else ()
    names = [name for name in first if name in known]
    names += [name for name in known if name not in names]
    shards = sorted({folder for row in rows for folder in row.result.shards})
    published = [] if paper == "none" else paper_tables(kind, shards if paper == "same" else None)
    if not shards and paper == "same":
        published = []
    lines = [[row.label, *_cells(row.figures, names)] for row in rows]
    lines += _chances(rows, names)
    lines += [cells for table in published for cells in _published(table, names, shards)]
    head = ["", *names]
    if len(names) > WIDEST and not first:
        lines = [list(column) for column in zip(head, *lines)]
        head, lines = lines[0], lines[1:]
    return Table(
        title_of(kind),
        head,
        lines,
        [*_notes(rows), *_cited(kind, published, shards, paper)],
    )


def _cells(figures: dict[str, Figure], names: Sequence[str]) -> list[str]:
    return [figures[name].percent() if name in figures else "" for name in names]


def _chances(rows: Sequence[ResultRow], names: Sequence[str]) -> Iterator[list[str]]:
    """Yield chance: one row if all were evaluated on the same data, else one for each."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cells = tuple(
            f"{100 * row.figures[name].chance:.1f}"
            if name in row.figures and row.figures[name].chance
            else ""
            for name in names
        )
        found.setdefault(cells, []).append(row.run)
    for cells, runs in found.items():
        if any(cells):
            of = "" if len(found) == 1 else f" ({', '.join(dict.fromkeys(runs))})"
            yield [f"chance{of}", *cells]


def _published(
    table: PaperTable, names: Sequence[str], shards: Sequence[str]
) -> Iterator[list[str]]:
    """Yield rows of one of the paper's tables, one for each split, under our heads."""
    only = split_of(table, shards)
    splits = dict.fromkeys(split for split, _ in table.columns)
    for label, values in table.rows:
        for split in splits:
            if only not in (None, split):
                continue
            own = {
                figure: value
                for (of, figure), value in zip(table.columns, values)
                if of == split and value is not None
            }
            where = f"{table.data} {split}".strip()
            cells = [f"{own[name]:.1f}" if name in own else "" for name in names]
            if any(cells):
                yield [f"paper, {where}: {label}", *cells]


def _notes(rows: Sequence[ResultRow]) -> Iterator[str]:
    if any(figure.low < figure.high for row in rows for figure in row.figures.values()):
        yield "Percent; in brackets 95 % bootstrap intervals over images."
    said: dict[str, list[str]] = {}
    for row in rows:
        counts = ", ".join(f"{count} {name}" for name, count in row.result.counts.items())
        where = " + ".join(row.result.shards)
        said.setdefault(f"{counts} of {where}" if where else counts, []).append(row.label)
    if len(said) > 1:
        yield "Not judged on the same data:"
    for data, labels in said.items():
        if data:
            of = f"{'; '.join(labels)}: " if len(said) > 1 else "Data: "
            yield f"{of}{data}."
    for result in {row.result.file: row.result for row in rows}.values():
        if result.skipped:
            kinds = kinds_in_words(result.skipped)
            yield f"{result.file.parent}: skipped {kinds}."
    notes: dict[str, list[str]] = {}
    for row in rows:
        notes.setdefault(row.run, []).extend(row.result.notes)
    yield from attributed(notes)


def _cited(
    kind: str, published: Sequence[PaperTable], shards: Sequence[str], paper: Paper
) -> Iterator[str]:
    if published:
        numbers = " and ".join(str(n) for n in dict.fromkeys(table.number for table in published))
        yield f"Rows of the paper: its Table {numbers} ({SOURCE}), as printed, without intervals."
        other = [table.data for table in published if table not in paper_tables(kind, shards)]
        if other:
            named = ", ".join(dict.fromkeys(other))
            yield f"The paper's figures are on {named}, ours are not: they do not compare."
    elif paper == "same" and (known := paper_tables(kind)):
        named = ", ".join(dict.fromkeys(table.data for table in known))
        yield f"The paper has such figures on {named}; these are on other data."
