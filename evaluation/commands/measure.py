"""Commands that measure a model: `vlp evaluate TASK`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from evaluation.commands import predictions
from evaluation.commands.options import (
    Batch,
    Device,
    EvaluationCommand,
    Limit,
    Model,
    Workers,
    first_rank,
    require_single_process,
)
from evaluation.jobs import JOBS, PROBES, Job
from vlp.command_line import Group, Overrides, new_app, positive, require_output
from vlp.config import Precision
from vlp.tasks.downstream.registry import BUILT_IN, task_kinds, task_summary


class Evaluations(Group):
    """Commands of built-in tasks and of tasks that plugins registered."""

    remedy = "; a task of your own needs --plugin FILE"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command, also of a task that a plugin registered."""
        self._add_tasks()
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, also of tasks that plugins registered."""
        self._add_tasks()
        return super().list_commands(ctx)

    def _add_tasks(self) -> None:
        # Plugins are loaded with the group's options, after the built-in commands were added.
        for kind in task_kinds():
            if kind not in self.commands:
                from evaluation.downstream.task_evaluation import get_evaluation

                single = new_app()
                job = get_evaluation(kind).job
                single.command(kind, cls=EvaluationCommand)(command_of(kind, job))
                self.add_command(typer.main.get_command(single), kind)


app = new_app("Measure a model; torchrun shares the work between its ranks.", Evaluations)
app.add_typer(predictions.app)

Out = Annotated[
    Path | None,
    Option(
        metavar="DIR",
        help="for JSON and Markdown; default MODEL/evaluation, of a run's model "
        "RUN/evaluation/model, of a hub name evaluation/OWNER--NAME",
    ),
]
ListCount = Annotated[
    int, Option("--list", metavar="N", help="print N pairs of each kind, to read by hand")
]
_SUITE_FIELDS = {"task", "shards", "name", "model"}


def command_of(kind: str, job: type[Job]) -> Callable[..., None]:
    """Return a command function with the fields of a job as options."""

    def command(
        model: str,
        shards: list[str],
        workers: int | None,
        device: str | None,
        out: Path | None,
        list_count: int = 0,
        **values: Any,
    ) -> None:
        from evaluation.suite.suite import model_of, run_job
        from vlp.config import validate
        from vlp.models.pretrained.local_copy import results_folder

        # Without defaults, so that validators see which options the user set.
        changes = {n: v for n, v in values.items() if v not in (None, job.model_fields[n].default)}
        settings = validate({"task": kind, "shards": shards, **changes}, job, f"evaluate {kind}")
        out = out or results_folder(model)
        require_output(out, is_folder=True)
        result = run_job(settings, model_of(settings, model), device, workers, progress=True)
        if first_rank():
            if list_count:
                from evaluation.probes.foils import examples

                print(*examples(result, list_count), sep="\n")
            print(result.table().text())
            print(f"\nwritten to {result.save(out)}")

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, annotation, default in _parameters(kind, job)
        ]
    )
    # typer prefers annotations to the signature.
    command.__annotations__ = {}
    command.__doc__ = inspect.getdoc(job)
    if job is Job:
        summary = task_summary(kind)
        command.__doc__ = f"{summary[0].upper()}{summary[1:]}, by a fine-tuned model."
    return command


def _parameters(kind: str, job: type[Job]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default of each option."""
    required = inspect.Parameter.empty
    yield "model", Model, required
    yield (
        "shards",
        Annotated[list[str], Option(metavar="DIR...", help="folders to evaluate on")],
        required,
    )
    # A suite file names task, shards and model once per entry; a command has its own options.
    for name, field in job.model_fields.items():
        if name in _SUITE_FIELDS:
            continue
        annotation, default = field.annotation, required if field.is_required() else field.default
        options: dict[str, Any] = {"help": (field.description or "").replace("null:", "default:")}
        if annotation == tuple[str, ...]:
            annotation, default, options["metavar"] = list[str] | None, None, "DIR..."
        elif name in ("classes", "templates"):
            options["metavar"] = "FILE"
        elif name in ("limit", "batch"):
            options |= {"metavar": "N", "parser": positive}
        # With an explicit name, typer adds no `--no-...`.
        names = [f"--{name}"] if annotation is bool else []
        yield name, Annotated[annotation, Option(*names, **options)], default
    if kind == "foils":
        yield "list_count", ListCount, 0
    yield "workers", Workers, None
    yield "device", Device, None
    yield "out", Out, None


for _kind in (*BUILT_IN, *PROBES):
    app.command(_kind, cls=EvaluationCommand)(command_of(_kind, JOBS.get(_kind, Job)))


@app.command(cls=EvaluationCommand)
def vision(
    model: Model,
    device: Device = None,
    precision: Annotated[
        Precision | None,
        Option(
            help="default: bf16 for classes and boxes on a GPU; widgets: as trained; else float32"
        ),
    ] = None,
    workers: Workers = None,
    limit: Annotated[
        int | None, Option(parser=positive, metavar="N", help="N samples, spread evenly over all")
    ] = None,
) -> None:
    """Evaluate a vision model on its test data."""
    from evaluation.options import EvalOptions
    from evaluation.results import Table, write_report
    from evaluation.vision import evaluate_folder
    from vlp.models.pretrained.local_copy import results_folder

    require_single_process("run vlp evaluate vision in one process, without torchrun")
    out = results_folder(model)
    require_output(out, is_folder=True)
    options = EvalOptions(limit, device=device, precision=precision, workers=workers)
    figures = evaluate_folder(model, options)
    table = Table(model, ["", "value"], [[name, f"{value:.2f}"] for name, value in figures.items()])
    print(table.text())
    print(f"\nwritten to {write_report(out, 'vision', table, figures)}")


@app.command("all", cls=EvaluationCommand)
def evaluate_all(
    config: Annotated[Path, Option(metavar="FILE", help="models and tasks")],
    out: Annotated[
        Path | None, Option(metavar="DIR", help="of the results; default: the configuration's")
    ] = None,
    device: Device = None,
    workers: Workers = None,
    overrides: Overrides = None,
) -> int:
    """Evaluate several models on several tasks.

    Prints a table of every task and a summary. --config names models and tasks
    (configs/evaluation/paper.yaml). OUT/MODEL/TASK holds each result; it is reused while model,
    options and data are the same, so an interrupted suite resumes. A failure does not stop the
    other evaluations; the exit code is then 1.
    """
    from evaluation.suite.suite import SuiteConfig
    from vlp.config import load_config

    loaded = load_config(config, SuiteConfig, overrides or ())
    return _run_suite(loaded, out or Path(loaded.output), device, workers)


@app.command(cls=EvaluationCommand)
def suite(
    model: Annotated[
        list[str],
        Option(
            metavar="MODEL...",
            help="model folders or hub names, transformers:DIR (CLIP, SigLIP), "
            "open_clip:ARCHITECTURE/TAG",
        ),
    ],
    shards: Annotated[list[str] | None, Option(metavar="DIR...", help="with captions")] = None,
    labelled: Annotated[
        list[str] | None, Option(metavar="DIR...", help="with classes; needs --classes")
    ] = None,
    classes: Annotated[str | None, Option(metavar="FILE", help="class names, one a line")] = None,
    out: Annotated[Path, Option(metavar="DIR", help="of the results")] = Path("runs/suite"),
    limit: Limit = None,
    batch: Batch = 64,
    device: Device = None,
    workers: Workers = None,
) -> int:
    """Evaluate models, also of open_clip and transformers.

    Prints recall and foils of captioned shards, and zero-shot accuracy of labelled images, with a
    column per model. OUT holds the results, which are reused as in `vlp evaluate all`.
    """
    from evaluation.suite.suite import suite_of

    config = suite_of(model, shards or (), labelled or (), classes, limit=limit, batch=batch)
    return _run_suite(config, out, device, workers)


def _run_suite(config: Any, out: Path, device: str | None, workers: int | None) -> int:
    import sys

    from evaluation.suite.suite import run_suite

    require_output(out, is_folder=True)
    result = run_suite(config, out, device, workers, progress=True)
    if first_rank():
        result.save(out)
        for table in result.tables():
            print(f"\n{table.text()}")
        print(f"\nwritten to {out}")
        for (model, label), error in result.failures.items():
            print(f"failed: {model}/{label}: {error}", file=sys.stderr)
    return 1 if result.failures else 0


@app.command(cls=EvaluationCommand)
def compare(
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    task: Annotated[
        str | None, Option(help="task to compare, if folders hold results of several tasks")
    ] = None,
    permutations: Annotated[
        int, Option(parser=positive, metavar="N", help="of the sign-flip test")
    ] = 10_000,
    out: Annotated[Path | None, Option(metavar="DIR", help="for JSON and Markdown too")] = None,
) -> None:
    """Compare two results on the same items.

    Prints differences with intervals and tests. A and B are files KIND.predictions.jsonl, folders
    that hold them, or model folders that were evaluated. The difference is B minus A.

    \b
      vlp evaluate compare runs/plain/best runs/ace/best --task vqa
    """
    from evaluation.suite.compare import compare as compare_results

    if first_rank():
        result = compare_results(first, second, task, permutations)
        print(result.table().text())
        if out is not None:
            print(f"\nwritten to {result.save(out)}")
