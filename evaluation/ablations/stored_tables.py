"""Tables of docs/results: what each compares, its stored figures, and the paper's beside them.

`configs/ablation/results/tables.yaml` names the tables, `TABLE.csv` beside it has every figure by
seed. Pages of the documentation, `docs/results/TABLE.json` and `vlp reproduce` are made of both.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat
from scipy import stats

from evaluation.ablations.config import AblationConfig
from evaluation.ablations.runs import LAUNCH, Results, portable
from evaluation.ablations.tables import compare_rows, gates, tables
from evaluation.results import Table
from vlp.config import Config, ConfigError, load_config

REGISTRY = LAUNCH.parent / "configs" / "ablation" / "results" / "tables.yaml"
NULL = {
    "paper": "the paper prints no figure under this head for this row",
    "ours": "not run, or not measured here under the paper's head",
    "deviation": "fewer than two seeds",
    "interval": "fewer than two seeds",
    "difference": "ours or the paper's is missing",
    "effect": "differences do not vary",
    "effect_interval": "differences do not vary",
    "minutes": "not recorded when it was run",
    "minutes_a_run": "not recorded when it was run",
}
"""Why a field of the JSON is null."""


class StoredTableConfig(Config):
    """One page of tables: what it compares and how it was measured."""

    ablation: str | None = Field(None, description="configuration, in the folder above this file")
    overrides: tuple[str, ...] = Field((), description="changes to the configuration")
    variants: tuple[str, ...] = Field((), description="that are trained; none means all")
    command: str | None = Field(None, description="that makes it, where no ablation does")
    paper: str | None = Field(None, description="paper and its tables")
    compared: str = Field(description="what ours and the paper's were measured on")
    minutes: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="least and most of one run, as measured; null: not recorded"
    )
    hardware: str = Field(
        "one of 2 CPU cores a run, shared with other work; no GPU", description="of our figures"
    )
    not_run: str | None = Field(None, description="why there are no figures of ours")


class StoredTablesConfig(Config):
    """All tables, by the names that `vlp reproduce` takes."""

    tables: Mapping[str, StoredTableConfig] = Field(description="in the order of the list")


class StoredTable:
    """One entry of the registry, with its configuration and its stored figures.

    Args:
        name: of the table.
        entry: what the registry says of it.
        folder: the registry's, where `NAME.csv` lies.
    """

    def __init__(self, name: str, entry: StoredTableConfig, folder: Path) -> None:
        self.name, self.entry = name, entry
        self.figures = folder / f"{name}.csv"
        self.source = None if entry.ablation is None else folder.parent / entry.ablation

    @property
    def command(self) -> str:
        """The command that makes the table."""
        return self.entry.command or f"vlp reproduce {self.name}"

    def config(self, overrides: Sequence[str] = ()) -> AblationConfig:
        """Read the ablation's configuration.

        Raises:
            ConfigError: the table is of no ablation, or the configuration cannot be used.
        """
        if self.source is None:
            why = self.entry.not_run or "it is no ablation"
            raise ConfigError(f"{self.name}: {why}; its command is {self.command}")
        return load_config(self.source, AblationConfig, [*self.entry.overrides, *overrides])

    def results(self) -> Results:
        """Read the stored figures by variant and seed; none where nothing was run."""
        if not self.figures.is_file():
            return {}
        with self.figures.open(encoding="utf-8", newline="") as lines:
            return {
                (row.pop("variant"), int(row.pop("seed"))): {
                    "figures": {name: float(cell) for name, cell in row.items() if cell}
                }
                for row in csv.DictReader(lines)
            }

    def minutes(self) -> list[float] | None:
        """Return the measured minutes of a run, least and most, times the number of stored runs."""
        runs, each = len(self.results()), self.entry.minutes
        return None if each is None else [round(runs * minutes, 1) for minutes in each]

    def facts(self) -> dict[str, Any]:
        """Return what was compared, how long it took and which command does it again."""
        results, source = self.results(), self.source
        return {
            "table": self.name,
            "paper": self.entry.paper,
            "compared": self.entry.compared,
            "configuration": None if source is None else portable(source),
            "command": self.command,
            "hardware": self.entry.hardware,
            "runs": len(results),
            "seeds": sorted({seed for _, seed in results}),
            "minutes_a_run": self.entry.minutes,
            "minutes": self.minutes(),
        }

    def to_json(self) -> str:
        """Write all as JSON, a line for each figure and test; `null` says why a field is null."""
        head = {
            **self.facts(),
            "interval": "95 %, Student's t over seeds",
            "null": NULL | {"paper": NULL["paper"] if self.entry.paper else "no paper's table"},
        }
        opened = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        config, results = self.config(), self.results()
        for name, found in (
            ("figures", records(config, results)),
            ("tests", paired_tests(config, results)),
        ):
            lines = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in found)
            opened += f',\n "{name}": [\n  {lines}\n ]'
        return opened + "\n}\n"

    def markdown(self) -> str:
        """Lay out facts, gates and all tables for the documentation."""
        config, results = self.config(), self.results()
        facts = {
            "paper": self.entry.paper or "–",
            "measured on": self.entry.compared,
            "hardware": self.entry.hardware,
            "minutes of all runs on one core": _span(self.minutes()),
            "run again": f"`{self.command}`",
            "every figure": f"[{self.name}.json](../{self.name}.json)",
        }
        about = Table("How it was measured", ["", ""], [list(fact) for fact in facts.items()])
        parts = [about, *tables(config, results)]
        found = records(config, results)
        if any(each["difference"] is not None for each in found):
            parts.append(compare_with_paper(found))
        return "\n\n".join([*gates(config, results), *(part.markdown() for part in parts)])


def stored_tables(registry: Path | None = None) -> dict[str, StoredTable]:
    """Read the registry.

    Args:
        registry: the file; None is the checkout's.

    Raises:
        ConfigError: the file is missing or cannot be used.
    """
    file = registry or REGISTRY
    entries = load_config(file, StoredTablesConfig).tables
    return {name: StoredTable(name, entry, file.parent) for name, entry in entries.items()}


def records(config: AblationConfig, results: Results) -> list[dict[str, Any]]:
    """Return every figure of every row, ours beside the paper's, as plain JSON values."""
    found = []
    for compared in compare_rows(config, results):
        for row, values in zip(compared.table.rows, compared.values, strict=True):
            paper = dict(zip(compared.table.paper, row.paper, strict=False))
            for head in dict.fromkeys([*values, *paper]):
                own = values.get(head) or {}
                if own or head in paper:
                    named = {"table": compared.table.title, "row": row.label, "figure": head}
                    found.append({**named, **_summary(own, paper.get(head))})
    return found


def paired_tests(config: AblationConfig, results: Results) -> list[dict[str, Any]]:
    """Return every paired difference from a table's reference, as plain JSON values."""
    found = []
    for compared in compare_rows(config, results):
        for row, differences in zip(compared.table.rows, compared.differences, strict=True):
            for what, each in differences.items():
                if each is not None and each.seeds > 1:
                    named = {
                        "table": compared.table.title,
                        "row": row.label,
                        "figure": what or next(iter(compared.columns)),
                        "reference": compared.table.reference,
                    }
                    interval = _interval(each.mean, each.deviation, each.seeds)
                    figures = {name: _rounded(v) for name, v in each.to_json().items()}
                    found.append({**named, **figures, "interval": interval})
    return found


def compare_with_paper(found: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the figures that both we and the paper have under one head."""
    rows = [
        [
            f"{each['row']} ({each['table'].partition(':')[0]})", each["figure"],
            f"{each['ours']:.1f}{_bracket(each['interval'])}", f"{each['paper']:g}",
            f"{each['difference']:+.1f}", str(len(each["seeds"])),
        ]
        for each in found
        if each["difference"] is not None
    ]  # fmt: skip
    head = ["", "figure", "ours [95 %]", "paper", "difference", "seeds"]
    notes = ["Ours and the paper's are measured on different data and sizes, as said above."]
    return Table("Ours less the paper's", head, rows, notes)


def compare_runs(
    stored: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], title: str
) -> Table:
    """Lay out stored figures, those of a new run and the paper's, where the new run has any."""
    before = {(each["table"], each["row"], each["figure"]): each for each in stored}
    rows = []
    for each in now:
        if each["ours"] is None:
            continue
        kept = before.get((each["table"], each["row"], each["figure"]), {}).get("ours")
        cells = [
            "–" if value is None else f"{value:.2f}"
            for value in (kept, each["ours"], None if kept is None else each["ours"] - kept)
        ]
        paper = "–" if each["paper"] is None else f"{each['paper']:g}"
        rows.append([each["row"], each["figure"], *cells, paper, str(len(each["seeds"]))])
    head = ["", "figure", "stored", "now", "now − stored", "paper", "seeds"]
    return Table(title, head, rows)


def list_tables(found: Mapping[str, StoredTable]) -> Table:
    """Lay out the names with measured minutes and commands."""
    rows = []
    for name, table in found.items():
        results = table.results()
        state = f"{len(results)} runs" if results else f"not run: {table.entry.not_run}"
        minutes = _span(table.minutes()) if results else "–"
        rows.append([name, table.entry.paper or "–", minutes, state, table.command])
    head = ["table", "paper", "minutes, one core", "stored", "command"]
    return Table("Tables of docs/results", head, rows)


def _summary(own: Mapping[int, float], paper: float | None) -> dict[str, Any]:
    values = list(own.values())
    mean = float(np.mean(values)) if values else None
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {
        "ours": _rounded(mean),
        "deviation": _rounded(deviation),
        "interval": None
        if mean is None or deviation is None
        else _interval(mean, deviation, len(values)),
        "seeds": list(own),
        "paper": paper,
        "difference": None if mean is None or paper is None else _rounded(mean - paper),
    }


def _interval(mean: float, deviation: float, seeds: int) -> list[float]:
    """Return the 95 % interval of a mean over seeds, by Student's t."""
    half = float(stats.t.ppf(0.975, seeds - 1)) * deviation / math.sqrt(seeds)
    return [round(mean - half, 4), round(mean + half, 4)]


def _rounded(value: Any) -> Any:
    """Round to four significant digits below one, and to four places above."""
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if abs(value) < 1 else round(value, 4)


def _bracket(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.1f}, {interval[1]:.1f}]"


def _span(minutes: Sequence[float] | None) -> str:
    if minutes is None:
        return "not recorded"
    low, high = minutes
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
