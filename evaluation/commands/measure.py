"""Commands that measure a model: `vlp evaluate TASK`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from evaluation.commands import predictions
from evaluation.commands.options import (
    Device,
    EvaluationCommand,
    Limit,
    Model,
    View,
    Workers,
    checked,
    first_rank,
    load_model,
    measurement,
    one_process,
)
from vlp.command_line import Group, Overrides, new_app, positive
from vlp.config import Precision
from vlp.tasks.downstream.registry import task_kinds, task_summary
from vlp.tasks.vqa.metrics import Version


class Evaluations(Group):
    """Commands of built-in tasks and of those that plugins have registered."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Add the command of a plugin's task, which is known once `--plugin` was read."""
        if (kind := args[0]) not in self.commands and kind in task_kinds():
            single = new_app()
            single.command(kind, cls=EvaluationCommand)(command_of(kind))
            self.add_command(typer.main.get_command(single), kind)
        return super().resolve_command(ctx, args)


app = new_app("Measure a model; torchrun shares the work between its ranks.", Evaluations)
app.add_typer(predictions.app)

_ANY_MODEL = {"retrieval", "grounding"}
"""Tasks with commands of their own below, which take any model folder."""

CombineScores = Literal["sum", "match"]


@app.command(cls=EvaluationCommand)
@measurement()
def retrieval(
    model: str,
    rerank: Annotated[
        int, Option(metavar="K", help="candidates that the cross-modal encoder scores")
    ] = 0,
    rerank_by: Annotated[
        CombineScores | None,
        Option(
            help="with --rerank: add the match score to the similarity (default), or let it "
            "replace it"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        Option(
            metavar="T",
            help="of the similarity in that sum (default: the model's own); half of it halves the "
            "weight of the match score",
        ),
    ] = None,
    features: Annotated[
        list[Path] | None,
        Option(
            metavar="FOLDER",
            help="stored features of the images, of the bank's too, by the same tower; one folder "
            "or several",
        ),
    ] = None,
    bank: Annotated[
        list[Path] | None,
        Option(
            metavar="SHARDS",
            help="shards of other pairs, such as those of training: images and captions that are "
            "near to everything lose by it (query-bank normalisation)",
        ),
    ] = None,
    bank_temperature: Annotated[
        float | None,
        Option(
            metavar="T", help="with --bank: the lower, the more the nearest count (default: 0.1)"
        ),
    ] = None,
    **measured: Any,
) -> Any:
    """Image-text retrieval: recall in both directions.

    With --rerank the cross-modal encoder re-ranks the best candidates.
    """
    from evaluation.retrieval.retrieval import BANK_TEMPERATURE, evaluate_retrieval

    if bank_temperature is not None and not bank:
        raise typer.BadParameter("--bank-temperature goes with --bank SHARDS")
    if rerank_by is not None and not rerank:
        raise typer.BadParameter("--rerank-by says how to re-rank: give --rerank K too")
    if temperature is not None and (not rerank or rerank_by == "match" or temperature <= 0):
        raise typer.BadParameter("--temperature T, above 0, goes with --rerank K by sum")
    return evaluate_retrieval(
        load_model(model),
        rerank=rerank,
        rerank_by=rerank_by or "sum",
        temperature=temperature,
        features=features or (),
        bank=bank or (),
        bank_temperature=BANK_TEMPERATURE if bank_temperature is None else bank_temperature,
        **measured,
    )


def command_of(kind: str) -> Callable[..., Any]:
    """Return the function behind the command of a kind of task."""
    if kind == "vqa":
        return vqa

    def evaluate(model: str, **measured: Any) -> Any:
        return _evaluated(kind, model, **measured)

    summary = task_summary(kind)
    evaluate.__doc__ = (
        f"{summary[0].upper()}{summary[1:]}.\n\n"
        f"Evaluates a fine-tuned model. Figures have intervals. OUT gets {kind}.json, {kind}.md "
        f"and {kind}.predictions.jsonl."
    )
    return measurement()(evaluate)


@measurement("questions")
def vqa(
    model: str,
    predict: Annotated[
        Literal["rank", "generate"] | None,
        Option(help="choose from the list of answers, or write freely (default: as fine-tuned)"),
    ] = None,
    version: Annotated[
        Version | None,
        Option(
            help="the current official evaluator, or ALBEF's older one (default: as fine-tuned)"
        ),
    ] = None,
    **measured: Any,
) -> Any:
    """Visual question answering.

    Evaluates a fine-tuned model. Figures have intervals. OUT gets vqa.json, vqa.md and
    vqa.predictions.jsonl.
    """
    return _evaluated("vqa", model, predict=predict, version=version, **measured)


def _evaluated(kind: str, model: str, **measured: Any) -> Any:
    from evaluation.downstream import evaluate_task
    from vlp.tasks.downstream.task import load_task

    task = checked(lambda: load_task(model))
    if task.kind != kind:
        raise typer.BadParameter(
            f"{model} is fine-tuned for {task.kind}: python -m evaluation {task.kind} ..."
        )
    return evaluate_task(task, **measured)


for _kind in task_kinds():
    if _kind not in _ANY_MODEL:
        app.command(_kind, cls=EvaluationCommand)(command_of(_kind))


@app.command(cls=EvaluationCommand)
@measurement("expressions")
def grounding(
    model: str,
    by: Annotated[
        Literal["gradcam", "similarity"] | None,
        Option(
            help="Grad-CAM of a cross-attention layer, or the cosine of tokens and patches "
            "(default: what the model was fine-tuned and chosen by, else Grad-CAM)"
        ),
    ] = None,
    layer: Annotated[
        int | None, Option(metavar="L", help="of Grad-CAM, from 0 (default: the middle one)")
    ] = None,
    head: Annotated[
        int | None,
        Option(metavar="N", help="make the map of an expression's first N tokens (default: all)"),
    ] = None,
    view: View = "image",
    **measured: Any,
) -> Any:
    """Visual grounding of referring expressions.

    Samples need `expressions`; with `proposals` boxes are chosen among those, else only the
    pointing game is scored. Any model folder will do, best one fine-tuned for grounding.
    """
    from evaluation.grounding.grounding import evaluate_grounding
    from vlp.tasks.grounding.task import map_of

    loaded = load_model(model)
    if (by or map_of(loaded.folder).by) == "similarity" and layer is not None:
        raise typer.BadParameter(
            "--layer is of Grad-CAM, and the map is made by similarity: leave it out, or give "
            "--by gradcam"
        )
    return evaluate_grounding(loaded, by=by, layer=layer, head=head, view=view, **measured)


@app.command(cls=EvaluationCommand)
@measurement()
def zeroshot(
    model: str,
    classes: Annotated[Path, Option(metavar="FILE", help="a class name a line")],
    templates: Annotated[
        Path | None, Option(metavar="FILE", help="a prompt a line; default: a photo of a {}.")
    ] = None,
    label_field: Annotated[
        str, Option(metavar="NAME", help="field of the JSON in shards that holds the class")
    ] = "label",
    match: Annotated[
        int,
        Option(
            metavar="[K]",
            help="let the cross-modal encoder score the best K classes again (5 without a number)",
        ),
    ] = 0,
    match_by: Annotated[
        CombineScores | None,
        Option(help="with --match: add its score to the similarity (default), or replace it"),
    ] = None,
    **measured: Any,
) -> Any:
    """Zero-shot classification of images by prompts.

    The class is the one whose prompts lie nearest to the image. --shards takes shard folders, whose
    samples name their class as `label`, folders of class folders, and tar files of such. --classes
    has a class name a line, or what the data calls the class, a tab and the name. --templates has a
    prompt a line, such as "a photo of a {}."; the features of a class's prompts are averaged.

    \b
      vlp evaluate zeroshot --model runs/base/model --shards cifar10/test.tar.xz --classes c.txt
    """
    from evaluation.zeroshot import evaluate_zeroshot, read_prompts

    if match_by is not None and not match:
        raise typer.BadParameter("--match-by says how classes are scored again: give --match too")
    return evaluate_zeroshot(
        load_model(model),
        prompts=read_prompts(classes, templates),
        label_field=label_field,
        match=match,
        match_by=match_by or "sum",
        **measured,
    )


@app.command(cls=EvaluationCommand)
@measurement()
def pointing(
    model: str,
    controls: Annotated[
        bool,
        Option(
            "--controls",
            help="also point by anchors, paths and Grad-CAM, and without text: by the image "
            "encoder's attention, the mean box and the centre",
        ),
    ] = False,
    **measured: Any,
) -> Any:
    """Pointing accuracy of words (generated corpus, COCO)."""
    from evaluation.probes.word_pointing import evaluate_pointing

    return evaluate_pointing(load_model(model), controls=controls, **measured)


@app.command(cls=EvaluationCommand)
@measurement("swaps")
def swaps(
    model: str,
    view: View = "image",
    **measured: Any,
) -> Any:
    """Tell an arrangement from its swap (generated corpus)."""
    from evaluation.probes.swaps import evaluate_swaps

    return evaluate_swaps(load_model(model), view=view, **measured)


@app.command(cls=EvaluationCommand)
@measurement("images")
def foils(
    model: str,
    view: View = "image",
    seed: Annotated[int, Option(metavar="N", help="of the choice of foils")] = 0,
    shown: Annotated[
        int, Option("--list", metavar="N", help="print N pairs of each kind, to read by hand")
    ] = 0,
    **measured: Any,
) -> Any:
    """Tell a caption from the same one with one thing exchanged (any captioned images).

    Exchanged are subject and object, colours, numbers, prepositions, left and right, near and far.
    Blank images show what the text alone gives away. OUT gets every pair with its scores.
    """
    from evaluation.probes.foils import evaluate_foils, examples

    result = evaluate_foils(load_model(model), view=view, seed=seed, **measured)
    if first_rank():
        print(*examples(result, shown), sep="\n")
    return result


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

    one_process("vision models are evaluated in one process")
    options = EvalOptions(limit, device=device, precision=precision, workers=workers)
    figures = checked(lambda: evaluate_folder(model, options))
    table = Table(model, ["", "value"], [[name, f"{value:.2f}"] for name, value in figures.items()])
    print(table.text())
    print(f"\nwritten to {write_report(results_folder(model), 'vision', table, figures)}")


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
    (configs/evaluation/paper.yaml). OUT/MODEL/TASK holds each result; one whose model, options and
    data are the same is kept, so an interrupted call goes on where it was. What fails is named,
    does not stop the rest, and makes the exit code 1.
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
    batch: Annotated[int, Option(metavar="N", help="samples at once")] = 64,
    device: Device = None,
    workers: Workers = None,
) -> int:
    """Evaluate models, also those of open_clip and transformers.

    Prints recall and foils of captioned shards, and zero-shot accuracy of labelled ones, a column
    for each model. OUT keeps what is done, as of `vlp evaluate all`.
    """
    from evaluation.suite.suite import suite_of

    made = checked(
        lambda: suite_of(model, shards or (), labelled or (), classes, limit=limit, batch=batch)
    )
    return _run_suite(made, out, device, workers)


def _run_suite(config: Any, out: Path, device: str | None, workers: int | None) -> int:
    import sys

    from evaluation.suite.suite import run_suite

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
        str | None, Option(help="which, where the folders hold results of several")
    ] = None,
    permutations: Annotated[int, Option(metavar="N", help="of the sign-flip test")] = 10_000,
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
        result = compare_results(first, second, task, permutations=permutations)
        print(result.table().text())
        if out is not None:
            print(f"\nwritten to {result.save(out)}")
