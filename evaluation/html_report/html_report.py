"""Runs in one self-contained page: figures beside the paper's, curves, cases, anchors and maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

import vlp
from evaluation.downstream.registry import get_evaluation
from evaluation.html_report.cases import Case, CaseGroup, retrieval_cases, task_cases
from evaluation.html_report.curves import Chart, compared_charts, training_charts
from evaluation.html_report.maps import AnchorRow, anchor_rows, expression_maps
from evaluation.html_report.page import page
from evaluation.html_report.run import course, settings, whole_config
from evaluation.html_report.sources import Source, read_sources
from evaluation.html_report.tables import Paper, result_tables, title_of
from evaluation.latex import latex
from evaluation.results import Table
from evaluation.retrieval.gallery import Gallery
from evaluation.samples import EvaluationError, said_in_one_line
from vlp.config import ConfigError
from vlp.models.folder import Loaded
from vlp.tasks.downstream.registry import task_kinds

Part = TypeVar("Part")


@dataclass
class RunPart:
    """Part of the page about one run."""

    source: Source
    settings: list[tuple[str, str]] = field(default_factory=list)
    course: list[tuple[str, str]] = field(default_factory=list)
    config: str = ""
    charts: list[Chart] = field(default_factory=list)
    cases: list[tuple[str, list[CaseGroup]]] = field(default_factory=list)
    anchors: list[AnchorRow] = field(default_factory=list)
    maps: list[Case] = field(default_factory=list)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Kinds of samples that training skipped, how many, and some of them."""
        examples = self.source.training.get("skipped_examples") or {}
        return [
            (kind, f"{count}: {'; '.join(map(str, examples.get(kind, ())))}".rstrip(": "))
            for kind, count in self.source.skipped.items()
        ]


@dataclass(frozen=True)
class Report:
    """Everything that was found, ready to be written."""

    runs: list[RunPart]
    tables: list[Table]
    compared: list[Chart]

    def html(self) -> str:
        """Return the page."""
        return page(self.runs, self.tables, self.compared)

    def markdown(self) -> str:
        """Return the tables alone."""
        return "\n".join(_plain(table).markdown() for table in self.tables)

    def latex(self) -> str:
        """Return the tables alone."""
        return latex(self.tables)


def make_report(
    folders: Sequence[str | Path],
    shards: Sequence[str | Path] = (),
    *,
    cases: int = 6,
    limit: int = 1000,
    paper: Paper = "same",
    device: torch.device | str | None = None,
) -> Report:
    """Read runs, and show their models some samples; the page names what is missing.

    Args:
        folders: run folders, model folders, or folders of results.
        shards: where the cases' images lie, and what anchors and maps are drawn of; none of these
            without.
        cases: best and worst cases of each kind; 0 is none.
        limit: samples that queries are searched among.
        paper: which of the paper's rows stand in the tables.
        device: where to compute; None is this rank's GPU, or the CPU.

    Raises:
        EvaluationError: a folder holds nothing to report, or a number is out of range.
        ConfigError: a shard folder cannot be read.
    """
    if cases < 0 or limit < 1:
        raise EvaluationError(f"cases {cases}, limit {limit}: at least 0 and 1")
    sources = read_sources(folders)
    runs = [_run(source, shards, cases, limit, device) for source in sources]
    logs = {source.name: source.log for source in sources if source.log}
    return Report(runs, result_tables(sources, paper), compared_charts(logs))


def _run(
    source: Source,
    shards: Sequence[str | Path],
    cases: int,
    limit: int,
    device: torch.device | str | None,
) -> RunPart:
    run = RunPart(
        source, settings(source), course(source), whole_config(source), training_charts(source.log)
    )
    if not shards:
        source.missing.append("no shards were given, so no cases, anchors or maps")
        return run
    if not cases:
        return run
    loaded = None
    if source.model is not None:
        loaded = _or_word(source, "the model", partial(_load, source.model))
    for result in source.results:
        if not (result.kind in task_kinds() and get_evaluation(result.kind).case_scores):
            continue
        title = title_of(result.kind)
        groups = _or_word(
            source,
            f"cases of {title.lower()}",
            partial(task_cases, result, shards, cases, loaded, device),
        )
        if groups:
            run.cases.append((f"Cases: {title.lower()}", groups))
    if loaded is None:
        return run
    if source.task is None:
        gallery = _or_word(
            source,
            "cases of retrieval",
            partial(Gallery, loaded, shards, limit=limit, device=device),
        )
        if gallery is not None:
            title = f"Cases: retrieval among {len(gallery)} images, dual encoder"
            run.cases.append((title, retrieval_cases(gallery, cases)))
    few = min(cases, 3)
    run.anchors = (
        _or_word(source, "anchors", partial(anchor_rows, loaded, shards, few, device)) or []
    )
    kinds = {result.kind for result in source.results} & {*task_kinds()}
    if not any(get_evaluation(kind).draws_maps for kind in kinds):
        made = _or_word(source, "maps", partial(expression_maps, loaded, shards, few, device))
        run.maps = made or []
    return run


def _load(folder: Path | None) -> Loaded:
    with said_in_one_line():
        return vlp.load(str(folder))


def _or_word(source: Source, what: str, make: Callable[[], Part]) -> Part | None:
    """Make a part of the report; name one that cannot be made as missing."""
    try:
        return make()
    except (EvaluationError, FileNotFoundError) as error:
        source.missing.append(f"{what} ({error})")
    except ConfigError as error:
        # Shards that cannot be read are the user's to mend, whatever else the report could show.
        raise ConfigError(f"--shards: {error}") from error
    return None


def _plain(table: Table) -> Table:
    """Escape the bars in a table's cells and make each note a paragraph."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    # Lines that follow each other are one paragraph in Markdown.
    notes = [part for note in table.notes for part in (note, "")][:-1]
    head = [cell.replace("|", "\\|") for cell in table.head]
    return table._replace(head=head, rows=rows, notes=notes)
