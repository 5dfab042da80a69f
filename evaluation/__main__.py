"""`python -m evaluation TASK`: see `--help` for the tasks."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import vlp
from evaluation.anchors import anchor_details, anchor_maps, first_samples, read_pair
from evaluation.pictures import draw_anchor_detail, draw_anchor_maps
from evaluation.pointing import evaluate_pointing
from evaluation.ranks import Ranks, process_group
from evaluation.retrieval import evaluate_retrieval
from evaluation.samples import EvaluationError
from evaluation.swaps import evaluate_swaps
from vlp.config import ConfigError
from vlp.models.folder import Loaded

Tasks: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CAPTIONS, GROUPS = 4, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one evaluation; errors in what was asked for end with code 2 and one line."""
    options = _parser().parse_args(arguments)
    with process_group() as ranks:
        try:
            options.run(options, ranks)
        except (ConfigError, EvaluationError, FileNotFoundError) as error:
            if ranks.first:
                print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation",
        description="Evaluate a model folder; torchrun shares the work.",
    )
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    for add_task in (
        _add_retrieval,
        _add_pointing,
        _add_swaps,
        _add_anchors,
        _add_ablation,
        _add_positions,
        _add_vision,
        _add_encodings,
    ):
        add_task(tasks)
    return parser


def _add_retrieval(tasks: Tasks) -> None:
    parser = tasks.add_parser("retrieval", help="recall in both directions")
    _add_model(parser)
    _add_measured(parser)
    parser.add_argument(
        "--rerank", type=int, default=0, metavar="K", help="candidates the cross encoder sees"
    )
    parser.add_argument(
        "--rerank-by",
        choices=("sum", "match"),
        default="sum",
        help="add the match score to the similarity (default), or let it replace it",
    )
    parser.set_defaults(run=_retrieval)


def _retrieval(options: argparse.Namespace, ranks: Ranks) -> None:
    result = evaluate_retrieval(
        _load(options),
        rerank=options.rerank,
        rerank_by=options.rerank_by,
        **_measured(options),
    )
    _report(result, options, ranks)


def _add_pointing(tasks: Tasks) -> None:
    parser = tasks.add_parser("pointing", help="does a word find its object (generated corpus)")
    _add_model(parser)
    _add_measured(parser)
    parser.set_defaults(run=_pointing)


def _pointing(options: argparse.Namespace, ranks: Ranks) -> None:
    _report(evaluate_pointing(_load(options), **_measured(options)), options, ranks)


def _add_swaps(tasks: Tasks) -> None:
    parser = tasks.add_parser(
        "swaps", help="is an arrangement told from its swap (generated corpus)"
    )
    _add_model(parser)
    _add_measured(parser)
    parser.add_argument(
        "--view",
        choices=("picture", "shuffled", "blank"),
        default="picture",
        help="what the model sees: the pictures, their patches in random order, or nothing",
    )
    parser.set_defaults(run=_swaps)


def _swaps(options: argparse.Namespace, ranks: Ranks) -> None:
    result = evaluate_swaps(_load(options), view=options.view, **_measured(options))
    _report(result, options, ranks)


def _add_ablation(tasks: Tasks) -> None:
    parser = tasks.add_parser("ablation", help="train variants with several seeds, print tables")
    _add_compared(parser)
    parser.set_defaults(run=_ablation)


def _add_compared(parser: argparse.ArgumentParser) -> None:
    """Options of what trains variants itself."""
    parser.add_argument("--config", required=True, type=Path, metavar="FILE")
    parser.add_argument(
        "--report", action="store_true", help="only the tables of what is there; train nothing"
    )
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=(),
        metavar="NAME,…",
        help="train these variants now; the tables show all that are there",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")


def _ablation(options: argparse.Namespace, ranks: Ranks) -> None:
    # Trains, and needs what tables are tested with: nothing that other evaluations should load.
    from evaluation.ablation import AblationConfig, results, run_ablation
    from evaluation.ablation_tables import report, smallest_difference
    from vlp.config import load_config

    if ranks.world_size > 1:
        raise EvaluationError("an ablation runs side by side by itself: `jobs`, not torchrun")
    config = load_config(options.config, AblationConfig, options.overrides)
    print(smallest_difference(config))
    if not options.report:
        run_ablation(config, options.config, options.only)
    print(report(config, results(config, options.config)))


def _add_positions(tasks: Tasks) -> None:
    parser = tasks.add_parser(
        "positions", help="train vision models with other position encodings, print tables"
    )
    _add_compared(parser)
    parser.set_defaults(run=_positions)


def _positions(options: argparse.Namespace, ranks: Ranks) -> None:
    from evaluation.positions import PositionsConfig, results, run_comparison
    from evaluation.positions_tables import report, smallest_difference
    from vlp.config import load_config

    if ranks.world_size > 1:
        raise EvaluationError("a comparison runs side by side by itself: `jobs`, not torchrun")
    config = load_config(options.config, PositionsConfig, options.overrides)
    print(smallest_difference(config))
    if not options.report:
        run_comparison(config, options.config, options.only)
    print(report(config, results(config, options.config), Path(config.output)))


def _add_vision(tasks: Tasks) -> None:
    parser = tasks.add_parser("vision", help="a model of launch/train_vision.py on its test data")
    parser.add_argument("--model", required=True, metavar="DIR", help="the run's folder `model`")
    parser.add_argument("--device", help="default: this rank's GPU, or the CPU")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many test samples")
    parser.set_defaults(run=_vision)


def _vision(options: argparse.Namespace, ranks: Ranks) -> None:
    from evaluation.report import Table, write_report
    from evaluation.vision import evaluate_folder

    if ranks.world_size > 1:
        raise EvaluationError("vision models are evaluated in one process")
    try:
        figures = evaluate_folder(options.model, options.limit, options.device)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error
    rows = [[name, f"{value:.2f}"] for name, value in figures.items()]
    table = Table(str(options.model), ["", "value"], rows)
    print(table.text())
    folder = write_report(Path(options.model) / "evaluation", "vision", table, figures)
    print(f"\nwritten to {folder}")


def _add_encodings(tasks: Tasks) -> None:
    parser = tasks.add_parser("encodings", help="draw what each position encoding tells of patches")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    parser.set_defaults(run=_encodings)


def _encodings(options: argparse.Namespace, ranks: Ranks) -> None:
    from evaluation.position_maps import draw_position_maps

    if options.out.suffix.lower() != ".png":
        raise EvaluationError(f"--out {options.out}: the picture is a .png file")
    if ranks.first:
        print(draw_position_maps(options.out))


def _add_anchors(tasks: Tasks) -> None:
    parser = tasks.add_parser(
        "anchors",
        help="draw where the anchors of each word lie",
        description=(
            "A picture file and a text give a grid of everything: anchors, Grad-CAM and the path "
            "of each channel group, and its arrays as .npz. Shards give an overview of several "
            "captions, or with --detail a grid of each."
        ),
    )
    _add_model(parser)
    parser.add_argument("--image", type=Path, metavar="FILE", help="a picture, with --text")
    parser.add_argument("--text", help="what to look for in --image")
    parser.add_argument("--shards", nargs="+", metavar="DIR", help="instead of --image and --text")
    parser.add_argument(
        "--count",
        type=int,
        metavar="K",
        help=f"captions from --shards, one of each picture (default {CAPTIONS}, or 1 in detail)",
    )
    parser.add_argument("--detail", action="store_true", help="the grid, for --shards too")
    parser.add_argument(
        "--layer",
        type=int,
        metavar="L",
        help="cross-modal layer of Grad-CAM, from 0, or negative from the end (default: the middle "
        "one; in the last, only the whole caption has a map)",
    )
    parser.add_argument(
        "--groups", type=int, metavar="G", help=f"groups drawn at most (default {GROUPS})"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    parser.set_defaults(run=_anchors)


def _anchors(options: argparse.Namespace, ranks: Ranks) -> None:
    _check_anchors(options)
    if not ranks.first:
        return
    if options.image is None and not options.detail:
        count = CAPTIONS if options.count is None else options.count
        maps = anchor_maps(_load(options), options.shards, count=count, device=options.device)
        print(draw_anchor_maps(maps, options.out))
        return
    if options.image is not None:
        samples = [read_pair(options.image, options.text)]
    else:
        samples = first_samples(options.shards, 1 if options.count is None else options.count)
    loaded = _load(options)
    details = anchor_details(loaded, samples, layer=options.layer, device=options.device)
    for number, detail in enumerate(details):
        out = options.out
        if len(details) > 1:
            out = out.with_stem(f"{out.stem}-{number}")
        print(draw_anchor_detail(detail, out, GROUPS if options.groups is None else options.groups))
        print(detail.save(out.with_suffix(".npz")))


def _check_anchors(options: argparse.Namespace) -> None:
    """Raises EvaluationError for options that do not go together."""
    if (options.image is None) == (options.shards is None):
        raise EvaluationError("give either --image and --text, or --shards")
    if (options.image is None) != (options.text is None):
        raise EvaluationError("--image and --text go together")
    if options.image is not None and options.count is not None:
        raise EvaluationError("--count is for --shards; --image is one picture")
    if options.image is None and not options.detail:
        for name in ("layer", "groups"):
            if getattr(options, name) is not None:
                raise EvaluationError(f"--{name} is for the grid: add --detail")
    if options.groups is not None and options.groups < 1:
        raise EvaluationError(f"--groups {options.groups}: at least one group is drawn")
    if options.out.suffix.lower() != ".png":
        raise EvaluationError(f"--out {options.out}: the picture is a .png file")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="model folder or hub name")
    parser.add_argument("--device", help="default: this rank's GPU, or the CPU")


def _load(options: argparse.Namespace) -> Loaded:
    """The model folder; one that is damaged or does not fit together is the user's to mend."""
    try:
        return vlp.load(options.model)
    except ValueError as error:
        raise EvaluationError(" ".join(str(error).split())) from error


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """Options of what is measured over whole shards and reported as a table."""
    parser.add_argument("--shards", required=True, nargs="+", metavar="DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N samples")
    parser.add_argument("--batch", type=int, default=64, help="pictures of one encoder call")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for JSON and Markdown; default MODEL/evaluation"
    )


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `_add_measured` as arguments of an evaluation."""
    names = ("shards", "limit", "batch", "device", "precision")
    return {"progress": True, **{name: getattr(options, name) for name in names}}


def _report(result: Any, options: argparse.Namespace, ranks: Ranks) -> None:
    if not ranks.first:
        return
    print(result.table().text())
    folder = options.out or Path(options.model) / "evaluation"
    print(f"\nwritten to {result.save(folder)}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
