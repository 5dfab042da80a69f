"""A local Gradio page with the actions of `evaluation.page.session`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from PIL import Image

from evaluation.downstream.task_evaluation import PageAction, page_actions
from evaluation.page.examples import examples
from evaluation.page.session import ModelSession
from evaluation.samples import EvaluationError
from vlp.config import ConfigError
from vlp.data.limits import MAX_IMAGE_BYTES

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


class PageBuilder:
    """Builder of a session's page, with an endpoint for each action of the model."""

    # Endpoints: `/search`, the task's (such as `/answer`), `/match`, `/ground`, `/anchors`.

    def __init__(self, session: ModelSession) -> None:
        self._gradio, self._session = gradio_module(), session
        self._images, self._captions, self._phrases, self._questions = zip(
            *examples(session.gallery), strict=True
        )
        self._second_images = [*self._images[1:], self._images[0]]
        # Place of the examples below each button.
        self._example_columns: dict[Any, Any] = {}

    def build(self) -> Any:
        """Return the page as `gradio.Blocks`."""
        gradio, session = self._gradio, self._session
        with gradio.Blocks(title=f"Try {session.name}", analytics_enabled=False) as blocks:
            gradio.Markdown(f"# Try `{session.name}`\n{abilities(session)}")
            with gradio.Row():
                image = self._image_input("Image", self._images)
                label, pair = "Second image, right of the first", session.image_count == 2
                second = self._image_input(label, self._second_images, pair)
            if session.gallery is not None:
                with gradio.Tab("Search"):
                    self._add_search(image)
            if session.action is not None:
                with gradio.Tab(session.action.tab):
                    self._add_task(session.action, image, second)
            if session.can_match:
                with gradio.Tab("Match"):
                    self._add_match(image)
                with gradio.Tab("Ground"):
                    self._add_ground(image)
            with gradio.Tab("Anchors"):
                self._add_anchors(image)
        return blocks

    def _add_search(self, image: Any) -> None:
        gradio, session = self._gradio, self._session
        query = self._text_input(
            f"Look for, in {len(session.gallery or ())} images", self._captions
        )
        button = self._submit_button("Search")
        nearest = ", the four nearest with the probability of a match"
        gradio.Markdown(
            f"The best first with similarity{nearest if session.can_match else ''}; a click makes "
            "one the image above."
        )
        results = self._image_gallery("results", 4, preview=False)
        self._add_action(button, "search", session.search, [query], [results], [self._captions])

        def select_image(results: list[tuple[Image.Image, str]], event: Any) -> Image.Image:
            return results[event.index][0]

        select_image.__annotations__["event"] = gradio.SelectData
        results.select(select_image, results, image, api_visibility="private")

    def _add_task(self, action: PageAction, image: Any, second: Any) -> None:
        session = self._session
        inputs = [image, second][: session.image_count]
        samples = [self._images, self._second_images][: session.image_count]
        if action.text is not None:
            texts = self._questions if action.name == "answer" else self._captions
            inputs.append(self._text_input(action.text, texts))
            samples.append(texts)
        button = self._submit_button(action.button)
        answers = self._gradio.Label(label=action.output)

        # Values are the images, then the text if the task reads one.
        def act(*values: Any) -> dict[str, float]:
            return dict(session.act(values[: session.image_count], *values[session.image_count :]))

        self._add_action(button, action.name, act, inputs, [answers], samples)

    def _add_match(self, image: Any) -> None:
        text = self._text_input("Does this text belong to the image?", self._captions)
        button = self._submit_button("Match")
        label = self._gradio.Label(label="Match")

        def match(image: str | None, text: str) -> dict[str, float]:
            return dict(self._session.match(image, text))

        samples = [self._images, self._captions]
        self._add_action(button, "match", match, [image, text], [label], samples)

    def _add_ground(self, image: Any) -> None:
        gradio, ground = self._gradio, self._session.ground
        phrase = self._text_input("Where is", self._phrases)
        button = self._submit_button("Show")
        gradio.Markdown("The image, and Grad-CAM of the phrase, from blue (weak) to red.")
        with gradio.Row():
            outputs = [self._image_output(), self._image_output()]
        samples = [self._images, self._phrases]
        self._add_action(button, "ground", ground, [image, phrase], outputs, samples)

    def _add_anchors(self, image: Any) -> None:
        caption = self._text_input("Caption", self._captions)
        button = self._submit_button("Show")
        self._gradio.Markdown(
            "For each word the share of channel groups in which a patch anchors it."
        )
        words = self._image_gallery("words", 6, preview=True)
        samples, act = [self._images, self._captions], self._session.anchors
        self._add_action(button, "anchors", act, [image, caption], [words], samples)

    def _add_action(
        self,
        button: Any,
        name: str,
        act: Callable[..., Any],
        inputs: list[Any],
        outputs: list[Any],
        samples: Sequence[Sequence[Any]],
    ) -> None:
        """Connect an action with its button and text inputs, and add examples.

        samples: example values of each input.
        """
        gradio, act = self._gradio, self._show_errors(act)
        submits = [part.submit for part in inputs if isinstance(part, gradio.Textbox)]
        event = gradio.on([button.click, *submits], act, inputs, outputs, api_name=name)
        # After an error, clear the outputs: they show the error's badge or an older result.
        empty = None if len(outputs) == 1 else [None] * len(outputs)
        event.failure(lambda: empty, None, outputs, api_visibility="private")
        with self._example_columns[button]:
            gradio.Examples(
                [list(values) for values in zip(*samples, strict=True)],
                inputs,
                outputs,
                act,
                run_on_click=True,
                cache_examples=False,
                label="Examples, answered at one click",
                api_visibility="private",
            )

    def _show_errors(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an action so that wrong inputs show an error on the page."""

        def call(*inputs: Any) -> Any:
            try:
                return act(*inputs)
            except (EvaluationError, ConfigError) as error:
                # Gradio reads the message as HTML.
                message = escape(str(error))
                raise self._gradio.Error(message, duration=8, print_exception=False) from error

        return call

    def _submit_button(self, label: str) -> Any:
        button = self._gradio.Button(label, variant="primary")
        self._example_columns[button] = self._gradio.Column(elem_classes="examples")
        return button

    def _image_gallery(self, kind: str, columns: int, preview: bool) -> Any:
        return self._gradio.Gallery(
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

    def _image_input(self, label: str, images: Sequence[Image.Image], visible: bool = True) -> Any:
        component = self._gradio.Image(
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

    def _text_input(self, label: str, texts: Sequence[str]) -> Any:
        return self._gradio.Textbox(texts[0], label=label)

    def _image_output(self) -> Any:
        return self._gradio.Image(
            show_label=False,
            interactive=False,
            format="png",
            min_width=140,
            buttons=[],
            elem_classes="image",
        )


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


def serve(session: ModelSession, host: str, port: int, block: bool = True) -> Any:
    """Serve the page without a public link, until interrupted (`block`) or in the background."""
    gradio, blocks = gradio_module(), PageBuilder(session).build()
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
