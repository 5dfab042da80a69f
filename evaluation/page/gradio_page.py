"""A local Gradio page with the actions of `evaluation.page.session`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, TypeVar

from PIL import Image

from evaluation.downstream.task_evaluation import page_actions
from evaluation.page.examples import examples
from evaluation.page.session import ModelSession
from evaluation.samples import EvaluationError
from vlp.config import ConfigError
from vlp.data.limits import MAX_IMAGE_BYTES

Answer = TypeVar("Answer")

HOST, PORT = "127.0.0.1", 7860


# Small images fill their frames; on a phone all tabs and columns fit on the screen.
STYLE = """
.image .image-frame img { object-fit: contain; }
.tiles .grid-wrap { max-height: none; }
.tiles .caption-label { max-width: 100%; }
.examples th { display: none; }
.examples td { padding: 2px 8px !important; text-align: left !important; }
.examples td img { height: 40px !important; width: 56px !important; object-fit: contain; }
.examples td .container { height: 44px !important; width: 60px !important; border: 0 !important; }
@media (max-width: 600px) {
  .tab-container button { padding: 0 6px; }
  .results .grid-container { grid-template-columns: repeat(2, minmax(0, 1fr)) !important; }
  .words .grid-container { grid-template-columns: repeat(3, minmax(0, 1fr)) !important; }
}
"""


def page(session: ModelSession) -> Any:
    """Build the page as `gradio.Blocks`, with an endpoint for each action of the model."""
    # Endpoints: `/search`, the task's (such as `/answer`), `/match`, `/ground`, `/anchors`.
    gradio = gradio_module()

    def show_errors(act: Callable[..., Answer]) -> Callable[..., Answer]:
        """Wrap an action so that wrong inputs show an error on the page."""

        def call(*inputs: Any) -> Answer:
            try:
                return act(*inputs)
            except (EvaluationError, ConfigError) as error:
                # Gradio reads the message as HTML.
                message = escape(str(error))
                raise gradio.Error(message, duration=8, print_exception=False) from error

        return call

    def add_action(
        button: Any,
        name: str,
        act: Callable[..., Any],
        inputs: list[Any],
        outputs: list[Any],
        samples: list[Sequence[Any]],
    ) -> None:
        submits = [part.submit for part in inputs if isinstance(part, gradio.Textbox)]
        triggers = [button.click, *submits]
        event = gradio.on(triggers, show_errors(act), inputs, outputs, api_name=name)
        # After an error, clear the outputs: they show the error's badge or an older result.
        empty = None if len(outputs) == 1 else [None] * len(outputs)
        event.failure(lambda: empty, None, outputs, api_visibility="private")
        with example_columns[button]:
            gradio.Examples(
                [list(values) for values in zip(*samples, strict=True)],
                inputs,
                outputs,
                show_errors(act),
                run_on_click=True,
                cache_examples=False,
                label="Examples, answered at one click",
                api_visibility="private",
            )

    example_columns: dict[Any, Any] = {}

    def submit_button(label: str) -> Any:
        button = gradio.Button(label, variant="primary")
        example_columns[button] = gradio.Column(elem_classes="examples")
        return button

    def image_gallery(kind: str, columns: int, preview: bool) -> Any:
        return gradio.Gallery(
            show_label=False,
            columns=columns,
            height="auto",
            object_fit="contain",
            type="pil",
            format="png",
            allow_preview=preview,
            interactive=False,
            buttons=[],
            elem_classes=["tiles", kind],
        )

    def image_input(label: str, images: Sequence[Image.Image], visible: bool = True) -> Any:
        component = gradio.Image(
            images[0] if visible else None,
            type="filepath",
            # None: Gradio passes the file on without decoding it.
            image_mode=None,
            label=label,
            sources=["upload", "clipboard"],
            format="png",
            height=260,
            visible=visible,
            elem_classes="image",
        )
        # Gradio's preprocess opens the file, with an unclear error if it is no image.
        preprocess = component.preprocess
        component.preprocess = lambda upload: (upload and upload.path) or preprocess(upload)
        return component

    def text_input(label: str, texts: Sequence[str]) -> Any:
        return gradio.Textbox(texts[0], label=label)

    def image_output() -> Any:
        return gradio.Image(
            show_label=False,
            interactive=False,
            format="png",
            min_width=140,
            buttons=[],
            elem_classes="image",
        )

    images, captions, phrases, questions = zip(*examples(session.gallery), strict=True)
    others = [*images[1:], images[0]]
    with gradio.Blocks(title=f"Try {session.name}", analytics_enabled=False) as blocks:
        gradio.Markdown(f"# Try `{session.name}`\n{abilities(session)}")
        with gradio.Row():
            image = image_input("Image", images)
            pair = session.image_count == 2
            second = image_input("Second image, right of the first", others, pair)
        if session.gallery is not None:
            with gradio.Tab("Search"):
                query = text_input(f"Look for, in {len(session.gallery)} images", captions)
                button = submit_button("Search")
                nearest = ", the four nearest with the probability of a match"
                gradio.Markdown(
                    f"The best first with similarity{nearest if session.can_match else ''}; a "
                    "click makes one the image above."
                )
                results = image_gallery("results", 4, preview=False)

                def search(text: str) -> list[tuple[Image.Image, str]]:
                    return [(hit.image, hit.text) for hit in session.search(text)]

                add_action(button, "search", search, [query], [results], [captions])

                def select_image(results: list[tuple[Image.Image, str]], event: Any) -> Image.Image:
                    return results[event.index][0]

                select_image.__annotations__["event"] = gradio.SelectData
                results.select(select_image, results, image, api_visibility="private")
        if (page_action := session.action) is not None:
            with gradio.Tab(page_action.tab):
                inputs = [image, second][: session.image_count]
                samples = [images, others][: session.image_count]
                if page_action.text is not None:
                    texts = questions if page_action.name == "answer" else captions
                    inputs.append(text_input(page_action.text, texts))
                    samples.append(texts)
                button = submit_button(page_action.button)
                answers = gradio.Label(label=page_action.output)

                def act(*values: Any) -> dict[str, float]:
                    if page_action.text is None:
                        return dict(session.act(page_action.name, values))
                    return dict(session.act(page_action.name, values[:-1], values[-1]))

                add_action(button, page_action.name, act, inputs, [answers], samples)
        if session.can_match:
            with gradio.Tab("Match"):
                text = text_input("Does this text belong to the image?", captions)
                button = submit_button("Match")
                probabilities = gradio.Label(label="Match")
                add_action(
                    button,
                    "match",
                    lambda image, text: dict(session.match(image, text)),
                    [image, text],
                    [probabilities],
                    [images, captions],
                )
            with gradio.Tab("Ground"):
                phrase = text_input("Where is", phrases)
                button = submit_button("Show")
                gradio.Markdown("The image, and Grad-CAM of the phrase, from blue (weak) to red.")
                with gradio.Row():
                    plain, heat = image_output(), image_output()
                add_action(
                    button,
                    "ground",
                    session.ground,
                    [image, phrase],
                    [plain, heat],
                    [images, phrases],
                )
        with gradio.Tab("Anchors"):
            caption = text_input("Caption", captions)
            button = submit_button("Show")
            gradio.Markdown("For each word the share of channel groups that anchor a patch.")
            words = image_gallery("words", 6, preview=True)
            add_action(
                button,
                "anchors",
                lambda image, text: [(hit.image, hit.text) for hit in session.anchors(image, text)],
                [image, caption],
                [words],
                [images, captions],
            )
    return blocks


def abilities(session: ModelSession) -> str:
    """Return a sentence on the model's training, and the requirements of missing actions."""
    requirements = {
        "Search": None if session.gallery is not None else "`--shards DIR`",
        "Match and Ground": None if session.can_match else "a model trained by ITM",
    }
    for action, kinds in page_actions().items():
        available = session.action is not None and session.action.name == action.name
        model = f"a model fine-tuned for {' or '.join(kinds)}"
        requirements[action.tab] = None if available else model
    training = f"Fine-tuned for {session.kind}." if session.kind else "Pretrained."
    missing = ", ".join(f"{tab} ({need})" for tab, need in requirements.items() if need)
    return f"{training} Not offered, with what it needs: {missing}."


def serve(session: ModelSession, host: str = HOST, port: int = PORT, block: bool = True) -> Any:
    """Serve the page without a public link, until interrupted (`block`) or in the background."""
    gradio, blocks = gradio_module(), page(session)
    # The default theme loads fonts from a server.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    try:
        blocks.launch(
            server_name=host,
            server_port=port,
            share=False,
            theme=theme,
            css=STYLE,
            max_file_size=MAX_IMAGE_BYTES,
            prevent_thread_lock=not block,
            footer_links=[],
        )
    except OSError as error:
        raise EvaluationError(f"{host}:{port} cannot be used ({error}); try --port") from error
    except ValueError as error:
        # Gradio requests its own page, and raises ValueError if a proxy answers instead.
        blocks.close()
        raise EvaluationError(
            f"the page at {host}:{port} does not answer; is a proxy in the way (set "
            f"NO_PROXY={host}), or the machine too busy?"
        ) from error
    return blocks


def gradio_module() -> Any:
    """Import Gradio without telemetry, with uploads in a private folder."""
    # Set before the import, which requests the newest version and counts starts.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    if "GRADIO_TEMP_DIR" not in os.environ:
        # The default, /tmp/gradio, belongs to its first user, and is readable by all.
        folder = tempfile.mkdtemp(prefix="vlp-page-")
        os.environ["GRADIO_TEMP_DIR"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        import gradio
    except ImportError as error:
        raise EvaluationError(
            "the page needs Gradio, which is not installed: pip install 'vlp[demo]', "
            "or pip install gradio"
        ) from error
    return gradio
