"""Commands that write predictions and features of data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from evaluation.commands.options import (
    Batch,
    Device,
    EvaluationCommand,
    Images,
    InferencePrecision,
    Limit,
    Model,
    Shards,
    Workers,
    first_rank,
    valid_text,
)
from vlp.command_line import new_app, positive

app = new_app()


@app.command(cls=EvaluationCommand)
def predict(
    model: Model,
    shards: Shards = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="with --shards: what is written")
    ] = None,
    format: Annotated[
        Literal["official", "jsonl"] | None, Option(help="with --shards (default: official)")
    ] = None,
    limit: Annotated[
        int | None,
        Option(
            parser=positive,
            metavar="N",
            help="with --shards: only the first N samples, expressions or questions",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        Option(parser=positive, metavar="N", help="with --shards: items at once (default: 64)"),
    ] = None,
    image: Images = None,
    text: Annotated[
        str | None,
        Option(
            parser=valid_text,
            metavar="TEXT",
            help="with --image: question, hypothesis, statement or caption",
        ),
    ] = None,
    precision: InferencePrecision = None,
    workers: Workers = None,
    device: Device = None,
) -> None:
    """Write predictions, also for data without labels.

    Shards give a file in the format of the benchmark's server (official), or with a JSON object a
    sample (jsonl). Image files and a text print the label, answer or caption with its probability.
    A model without a task selects boxes of referring expressions, or prints whether text and image
    match.

    \b
      vlp evaluate predict --model runs/vqa_v2/best --shards shards/vqa/test --out results.json
      vlp evaluate predict --model runs/vqa_v2/best --image a.jpg --text "is there a dog?"
    """
    from evaluation.downstream.predict import predict as predict_shards
    from evaluation.downstream.predict import predict_item, write_official
    from evaluation.options import EvalOptions
    from evaluation.results import write_lines
    from evaluation.samples import EvaluationError, format_kinds

    if bool(shards) == bool(image):
        raise typer.BadParameter("give either --shards and --out, or --image and --text")
    if bool(shards) != (out is not None):
        raise typer.BadParameter("--shards and --out go together")
    if image:
        # Defaults are None, to notice options that do nothing here.
        options = {"format": format, "limit": limit, "batch": batch, "workers": workers}
        for name, value in options.items():
            if value is not None:
                raise typer.BadParameter(f"--{name} is for --shards; leave it out with --image")
        if first_rank():
            print(predict_item(model, image, text, device, precision).text())
        return
    if text is not None:
        raise typer.BadParameter("--text is for --image; shards hold their own texts")
    assert shards is not None
    assert out is not None
    predictions = predict_shards(
        model, shards, EvalOptions(limit, batch or 64, device, precision, workers, progress=True)
    )
    if not first_rank():
        return
    if format == "jsonl":
        write_lines(out, predictions.rows)
    else:
        try:
            write_official(out, predictions)
        except EvaluationError as error:
            # Predictions may have taken hours: save them although they do not fit the format.
            rows_file = out.with_name(f"{out.name}.rows.jsonl")
            write_lines(rows_file, predictions.rows)
            raise EvaluationError(f"{error}; the predictions are in {rows_file}") from error
    if predictions.num_truncated:
        print(
            f"warning: {predictions.num_truncated} texts are truncated to the model's max_tokens",
            file=sys.stderr,
        )
    if predictions.skipped:
        kinds = format_kinds(predictions.skipped)
        print(
            f"warning: not predicted: {kinds}; a server may refuse a file that lacks items",
            file=sys.stderr,
        )
    print(f"{predictions.kind}: {len(predictions.rows)} predictions written to {out}")


@app.command(cls=EvaluationCommand)
def embed(
    model: Model,
    shards: Annotated[list[str], Option(metavar="DIR...", help="shard folders")],
    out: Annotated[Path, Option(metavar="DIR", help="folder to be made")],
    dtype: Literal["float32", "float16"] = "float32",
    limit: Limit = None,
    batch: Batch = 64,
    precision: InferencePrecision = None,
    workers: Workers = None,
    device: Device = None,
) -> None:
    """Write features of images and captions.

    Files: images.npy and captions.npy, and images.jsonl and captions.jsonl with a line for each
    row. Rows have unit length, in the order of the shards; numpy.load(..., mmap_mode="r") maps them
    from disk.

    \b
      vlp evaluate embed --model runs/base/model --shards shards/coco/val --out features/coco
    """
    from evaluation.downstream.task_evaluation import load_model
    from evaluation.embed import embed as embed_shards
    from evaluation.embed import require_empty
    from evaluation.options import EvalOptions
    from evaluation.samples import format_kinds

    require_empty(out)
    options = EvalOptions(limit, batch, device, precision, workers, progress=True)
    counts = embed_shards(load_model(model), shards, out, options, dtype=dtype)
    if first_rank():
        if counts.skipped:
            print(f"warning: skipped: {format_kinds(counts.skipped)}", file=sys.stderr)
        if counts.num_truncated:
            print(
                f"warning: {counts.num_truncated} captions are truncated to the model's max_tokens",
                file=sys.stderr,
            )
        print(f"{counts.images} images and {counts.captions} captions written to {out}")
