"""`python -m evaluation COMMAND ...`: commands of `vlp evaluate`, and further ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.commands import ablations, measure, reports
from evaluation.commands.options import EvaluationCommand
from vlp.command_line import new_app, run_app

app = new_app("Evaluate models; torchrun shares the work between its ranks.")
app.add_typer(measure.app)
app.add_typer(reports.app)
app.add_typer(ablations.app)
app.command("demo", cls=EvaluationCommand, hidden=True)(reports.serve_app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2: wrong input, 130: interrupted)."""
    return run_app(app, "python -m evaluation", arguments)


if __name__ == "__main__":
    sys.exit(main())
