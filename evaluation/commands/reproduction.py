"""`vlp reproduce`: lists the tables of docs/results, and runs one of them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from evaluation.commands.options import EvaluationCommand, one_process
from vlp.process.command_line import Overrides, nearest, new_app

app = new_app()


@app.command(cls=EvaluationCommand)
def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="name of a table; without it: the list")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="of the runs (default runs/reproduce/TABLE)")
    ] = None,
    seeds: Annotated[str, Option(metavar="N,...", help="instead of the table's")] = "",
    only: Annotated[str, Option(metavar="NAME,...", help="train these variants alone")] = "",
    write: Annotated[
        Path | None,
        Option(metavar="DIR", help="train nothing; write TABLE.json of stored figures, or all"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run a table of the results again.

    It prints the stored figures, the new ones and the paper's. Finished runs in --out are kept, so
    an interrupted table continues. Without TABLE the tables are listed, with measured minutes, and
    --write writes those of the pages photographs and downstream in DIR, too.

    \b
      vlp reproduce fourier_widgets --seeds 0,1 --only embed,sine
    """
    from evaluation.ablations.ablation import results, run_ablation
    from evaluation.ablations.page_tables import PAGES, page_json
    from evaluation.ablations.stored_tables import (
        compare_runs,
        list_tables,
        records,
        stored_tables,
    )
    from evaluation.ablations.tables import report
    from vlp.io import write_text

    one_process("a table's runs go side by side by themselves: `jobs`, not torchrun")
    known = stored_tables()
    if table is not None and table not in known:
        raise typer.BadParameter(f"unknown table {table!r}; {nearest(table, list(known))}")
    if write is not None:
        for name, each in known.items():
            if table in (None, name) and each.results():
                write_text(write / f"{name}.json", each.to_json())
                print(write / f"{name}.json")
        for page in PAGES:
            if table is None and (file := write / f"{page}.md").is_file():
                write_text(write / f"{page}.json", page_json(file.read_text("utf-8")))
                print(write / f"{page}.json")
        return
    if table is None:
        print(list_tables(known).text())
        return
    stored = known[table]
    changes = [f"output={json.dumps(str(out or Path('runs/reproduce') / table))}"]
    changes += [f"seeds=[{seeds}]"] if seeds else []
    config = stored.config([*changes, *(overrides or ())])
    assert stored.source is not None
    run_ablation(config, stored.source, tuple(only.split(",")) if only else stored.entry.variants)
    found = results(config, stored.source)
    report(config, found)
    before = records(stored.config(), stored.results())
    print(compare_runs(before, records(config, found), f"{table}: {stored.entry.compared}").text())
    print(f"all tables: {Path(config.output) / 'report.md'}")
