"""Commands that show models and runs: card, drawings, report, page, ablation tables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from evaluation.commands.options import (
    Device,
    EvaluationCommand,
    Model,
    Shards,
    first_rank,
    require_single_process,
    valid_text,
)
from vlp.command_line import MODELS, START_HERE, new_app, positive, require_output

app = new_app()


@app.command(cls=EvaluationCommand, rich_help_panel=MODELS)
def card(
    model: Annotated[str, Option(metavar="DIR", help="model folder")],
    licence: Annotated[
        str | None,
        Option("--license", "--licence", metavar="NAME", help="of the weights, such as apache-2.0"),
    ] = None,
) -> None:
    """Write the model card of a model folder for the hub.

    Its README.md holds the configuration, the parameters, the run's training data (where the folder
    lies in its run) and the tables of its evaluations. A card written by hand is left alone.
    """
    from evaluation.samples import single_line_errors
    from vlp.models.pretrained.local_copy import local_folder
    from vlp.serving.model_card import CARD, write_model_card

    if first_rank():
        folder = local_folder(model)
        with single_line_errors():
            written = write_model_card(folder, licence)
        if not written:
            raise typer.BadParameter(
                f"{folder / CARD} was written by hand; remove it to have one made"
            )
        print(f"written to {folder / CARD}")


@app.command(cls=EvaluationCommand, rich_help_panel=MODELS)
def anchors(
    model: Model,
    out: Annotated[Path, Option(metavar="FILE.png")],
    image: Annotated[Path | None, Option(metavar="FILE", help="an image, with --text")] = None,
    text: Annotated[
        str | None, Option(parser=valid_text, metavar="TEXT", help="what to look for in --image")
    ] = None,
    shards: Annotated[
        list[str] | None, Option(metavar="DIR...", help="instead of --image and --text")
    ] = None,
    count: Annotated[
        int | None,
        Option(metavar="K", help="captions from --shards, one of each image (default 4)"),
    ] = None,
    layer: Annotated[
        int | None,
        Option(
            metavar="L",
            help="cross-modal layer of Grad-CAM, from 0, or negative from the end (default: the "
            "middle one; in the last, only the whole caption has a map)",
        ),
    ] = None,
    groups: Annotated[
        int | None, Option(metavar="G", help="groups drawn at most (default 8)")
    ] = None,
    device: Device = None,
) -> None:
    """Draw maps of the anchors of each word.

    An image file and a text give a grid of all maps: anchors, Grad-CAM and the path of each channel
    group. Shards give an overview of several captions.
    """
    from evaluation.downstream.task_evaluation import load_model
    from evaluation.probes.anchor_maps import anchor_details, anchor_maps, read_pair
    from evaluation.probes.anchor_plots import draw_anchor_detail, draw_anchor_maps

    for wrong, message in (
        ((image is None) != bool(shards), "give either --image and --text, or --shards"),
        ((image is None) != (text is None), "--image and --text go together"),
        (image is not None and count is not None, "--count is for --shards; --image is one image"),
        (image is None and layer is not None, "--layer is for the grid of an --image"),
        (image is None and groups is not None, "--groups is for the grid of an --image"),
        (groups is not None and groups < 1, f"--groups {groups}: write a number of at least 1"),
        (out.suffix.lower() != ".png", f"--out {out}: name a .png file"),
    ):
        if wrong:
            raise typer.BadParameter(message)
    if not first_rank():
        return
    loaded = load_model(model)
    if image is not None and text is not None:
        (detail,) = anchor_details(loaded, [read_pair(image, text)], layer=layer, device=device)
        print(draw_anchor_detail(detail, out, 8 if groups is None else groups))
    else:
        maps = anchor_maps(loaded, shards or (), count=4 if count is None else count, device=device)
        print(draw_anchor_maps(maps, out))


@app.command(cls=EvaluationCommand, rich_help_panel=MODELS)
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN")],
    out: Annotated[
        Path | None, Option(metavar="FILE.html", help="(default: report.html in the first RUN)")
    ] = None,
    markdown: Annotated[Path | None, Option(metavar="FILE", help="the tables alone")] = None,
    latex: Annotated[Path | None, Option(metavar="FILE", help="the tables alone, booktabs")] = None,
    shards: Shards = None,
    cases: Annotated[int, Option(min=0, metavar="K", help="retrievals, best and worst")] = 6,
    limit: Annotated[
        int, Option(parser=positive, metavar="N", help="search the first N samples of --shards")
    ] = 1000,
    device: Device = None,
) -> None:
    """Report runs in one HTML page, in Markdown or in LaTeX.

    The page has figures with intervals, curves, and with --shards example retrievals and their
    anchors. A RUN is the folder of a training, a model folder, or a folder of results. The page
    needs no network and no other file.

    \b
      vlp report runs/plain runs/ace --shards shards/scenes/val --out report.html
    """
    from evaluation.latex import to_latex
    from evaluation.options import EvalOptions
    from evaluation.report.html_page import page, result_tables
    from evaluation.report.sources import read_sources
    from evaluation.samples import EvaluationError
    from vlp.io import write_text

    require_single_process("run vlp report in one process, without torchrun")
    sources = read_sources(runs)
    if out is None and markdown is None and latex is None:
        out = Path(runs[0]) / "report.html"
        require_output(out, is_folder=False)
    tables = result_tables(sources)
    options = EvalOptions(limit, device=device, progress=True)
    # Texts are made one by one, as a page with cases takes minutes.
    outputs: list[tuple[Path | None, Callable[[], str]]] = [
        (out, lambda: page(sources, shards or (), cases=cases, options=options)),
        (markdown, lambda: "\n".join(table.markdown() for table in tables)),
        (latex, lambda: to_latex(tables)),
    ]
    for path, make_text in outputs:
        if path is not None:
            write_text(path, make_text(), error=EvaluationError)
            print(path)


@app.command("app", cls=EvaluationCommand, rich_help_panel=START_HERE)
def serve_app(
    model: Model,
    shards: Annotated[list[str] | None, Option(metavar="DIR...", help="to search")] = None,
    limit: Annotated[
        int | None, Option(parser=positive, metavar="N", help="search the first N samples only")
    ] = None,
    host: Annotated[
        str, Option(metavar="NAME", help="address that the page is served at")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, metavar="N", help="port of the page")] = 7860,
    device: Device = None,
) -> None:
    """Serve a local page to try a model.

    It offers search, questions, captions, grounding and anchors, as far as the folder was
    fine-tuned for them; search needs --shards. Only this machine reaches the page, unless --host
    is another address. The user's cache folder keeps the features of the searched images.

    \b
      vlp app --model runs/ace/model --shards shards/scenes/val
    """
    from evaluation.page.gradio_page import gradio_module, serve
    from evaluation.page.session import ModelSession

    require_single_process("run vlp app in one process, without torchrun")
    # Before the images are encoded, which takes minutes.
    gradio_module()
    store = _gallery_store(model, shards, limit) if shards else None
    session = ModelSession(model, shards or (), limit=limit, device=device, store=store)
    print(f"http://{host}:{port}, end it with Ctrl-C", flush=True)
    serve(session, host, port)


def _gallery_store(model: str, shards: list[str], limit: int | None) -> tuple[Path, str] | None:
    """Return the file that keeps a page's features and a hash of their inputs, or None."""
    from evaluation.jobs import RetrievalJob
    from evaluation.samples import EvaluationError
    from evaluation.suite.suite import job_key
    from vlp.config import validate
    from vlp.data.limits import limits
    from vlp.models.pretrained.local_copy import local_folder

    job = validate({"shards": shards, "limit": limit}, RetrievalJob, "vlp app")
    # No home folder; or no such model or shards, which ModelSession then reports.
    with suppress(OSError, RuntimeError, EvaluationError):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlp"
        cache.mkdir(0o700, parents=True, exist_ok=True)
        cache.chmod(0o700)  # fails if the folder is another user's
        folder = local_folder(model)
        paths = [str(folder), *shards]
        source = "\n".join([*(os.path.realpath(path) for path in paths), str(limit)])
        name = f"page-{hashlib.sha256(source.encode()).hexdigest()[:16]}.npz"
        return cache / name, f"{job_key(job, folder, {})} {limits()}"
    return None
