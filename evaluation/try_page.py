"""A local page around `evaluation.try_it`: it only shows what that says. Needs Gradio."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from PIL import Image

from evaluation.samples import EvaluationError
from evaluation.try_it import TryIt
from vlp.config import ConfigError

Answer = TypeVar("Answer")

HOST, PORT = "127.0.0.1", 7860


def page(tried: TryIt) -> Any:
    """The page as `gradio.Blocks`, with what the model can do and no more.

    Each action has a name of the interface too: `/search`, `/answer`, `/caption`, `/judge`,
    `/match`, `/ground`, `/anchors`.

    Raises:
        EvaluationError: Gradio is not installed.
    """
    gradio = gradio_module()

    def shown(act: Callable[..., Answer]) -> Callable[..., Answer]:
        """Mistakes of the person who tries are said on the page."""

        def acted(*given: Any) -> Answer:
            try:
                return act(*given)
            except (EvaluationError, ConfigError) as error:
                raise gradio.Error(str(error), duration=8, print_exception=False) from error

        return acted

    def action(label: str, name: str, act: Callable[..., Any], inputs: list[Any], out: Any) -> None:
        button = gradio.Button(label, variant="primary")
        button.click(shown(act), inputs, out, api_name=name)
        typed = [part for part in inputs if isinstance(part, gradio.Textbox)]
        if typed:
            typed[0].submit(shown(act), inputs, out, api_visibility="private")

    with gradio.Blocks(title=f"Try {tried.name}", analytics_enabled=False) as blocks:
        kind = f"fine-tuned for {tried.kind}" if tried.kind else "pretrained"
        gradio.Markdown(f"# Try `{tried.name}`\n{kind}")
        with gradio.Row():
            picture = gradio.Image(type="pil", label="Picture", sources=["upload", "clipboard"])
            second = gradio.Image(
                type="pil",
                label="Second picture, right of the first",
                sources=["upload", "clipboard"],
                visible=tried.pictures_judged == 2,
            )
        if tried.gallery is not None:
            with gradio.Tab("Search"):
                wanted = gradio.Textbox(label=f"Look for, in {len(tried.gallery)} pictures")
                found = gradio.Gallery(
                    label="Found, the best first; a click makes one the picture above",
                    columns=4,
                    type="pil",
                    allow_preview=False,
                )

                def search(text: str) -> list[tuple[Image.Image, str]]:
                    return [(one.image, one.text) for one in tried.search(text)]

                action("Search", "search", search, [wanted], found)

                def choose(every: list[tuple[Image.Image, str]], event: Any) -> Image.Image:
                    return every[event.index][0]

                choose.__annotations__["event"] = gradio.SelectData
                found.select(choose, found, picture, api_visibility="private")
        if tried.answers_questions:
            with gradio.Tab("Ask"):
                question = gradio.Textbox(label="Question")
                answers = gradio.Label(label="Answer")
                action(
                    "Ask",
                    "answer",
                    lambda image, text: dict(tried.answer(image, text)),
                    [picture, question],
                    answers,
                )
        if tried.writes_captions:
            with gradio.Tab("Caption"):
                said = gradio.Label(label="Caption")
                action(
                    "Write", "caption", lambda image: dict(tried.caption(image)), [picture], said
                )
        if tried.pictures_judged:
            with gradio.Tab("Judge"):
                claim = gradio.Textbox(label="Hypothesis or statement")
                classes = gradio.Label(label="Judgement")
                both = [picture, second][: tried.pictures_judged]
                action(
                    "Judge",
                    "judge",
                    lambda *given: dict(tried.judge(given[:-1], given[-1])),
                    [*both, claim],
                    classes,
                )
        with gradio.Tab("Match"):
            text = gradio.Textbox(label="Does this text belong to the picture?")
            matched = gradio.Label(label="Match")
            action(
                "Match",
                "match",
                lambda image, said: dict(tried.match(image, said)),
                [picture, text],
                matched,
            )
        with gradio.Tab("Ground"):
            phrase = gradio.Textbox(label="Where is")
            heat = gradio.Image(label="Grad-CAM, from blue for weak to red for strong")
            action("Show", "ground", tried.ground, [picture, phrase], heat)
        with gradio.Tab("Anchors"):
            caption = gradio.Textbox(label="Caption")
            words = gradio.Gallery(
                label="For each word the share of channel groups that anchor a patch", columns=6
            )
            action(
                "Show",
                "anchors",
                lambda image, said: [(one.image, one.text) for one in tried.anchors(image, said)],
                [picture, caption],
                words,
            )
    return blocks


def serve(tried: TryIt, host: str = HOST, port: int = PORT, block: bool = True) -> Any:
    """Serve the page until it is interrupted, without a public link.

    Args:
        tried: the model.
        host: the default lets this machine in, and no other.
        port: where.
        block: whether to wait; the page is given back otherwise.

    Raises:
        EvaluationError: Gradio is not installed, or the port is taken.
    """
    gradio, blocks = gradio_module(), page(tried)
    # The usual theme would fetch its fonts from a server.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    try:
        blocks.launch(
            server_name=host,
            server_port=port,
            share=False,
            theme=theme,
            prevent_thread_lock=not block,
            footer_links=[],
        )
    except OSError as error:
        raise EvaluationError(f"{host}:{port} cannot be used ({error}); try --port") from error
    return blocks


def gradio_module() -> Any:
    """Gradio, told not to report to anybody.

    Raises:
        EvaluationError: it is not installed.
    """
    # Said before the import: Gradio asks its servers for its newest version and counts starts.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise EvaluationError(
            "the page needs Gradio, which is not installed: pip install 'vlp[demo]', "
            "or pip install gradio"
        ) from error
    return gradio
