"""A local page around `evaluation.page.session`: it only shows what that says. Needs Gradio."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, TypeVar

from PIL import Image

from evaluation.downstream.registry import page_actions
from evaluation.page.examples import examples
from evaluation.page.session import TryIt
from evaluation.samples import EvaluationError
from vlp.config import ConfigError
from vlp.data.limits import MAX_IMAGE_BYTES

Answer = TypeVar("Answer")

HOST, PORT = "127.0.0.1", 7860


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
  .found .grid-container { grid-template-columns: repeat(2, minmax(0, 1fr)) !important; }
  .words .grid-container { grid-template-columns: repeat(3, minmax(0, 1fr)) !important; }
}
"""
"""Small images fill their frames; a phone shows every tab, and no column leaves its screen."""


def page(tried: TryIt) -> Any:
    """Build the page as `gradio.Blocks`, with the actions that the model supports.

    Endpoints: `/search`, the task's (`/answer`), `/match`, `/ground`, `/anchors`.
    """
    gradio = gradio_module()

    def shown(act: Callable[..., Answer]) -> Callable[..., Answer]:
        """Show user errors on the page."""

        def acted(*given: Any) -> Answer:
            try:
                return act(*given)
            except (EvaluationError, ConfigError) as error:
                # Gradio would read the message as HTML.
                said = escape(str(error))
                raise gradio.Error(said, duration=8, print_exception=False) from error

        return acted

    def action(
        button: Any,
        name: str,
        act: Callable[..., Any],
        inputs: list[Any],
        out: list[Any],
        samples: list[Sequence[Any]],
    ) -> None:
        entered = [part.submit for part in inputs if isinstance(part, gradio.Textbox)]
        event = gradio.on([button.click, *entered], shown(act), inputs, out, api_name=name)
        # Else the badge of an error, or an older result, stays where the result would be.
        nothing = None if len(out) == 1 else [None] * len(out)
        event.failure(lambda: nothing, None, out, api_visibility="private")
        with below[button]:
            gradio.Examples(
                [list(values) for values in zip(*samples, strict=True)],
                inputs,
                out,
                shown(act),
                run_on_click=True,
                cache_examples=False,
                label="Examples, answered at one click",
                api_visibility="private",
            )

    below: dict[Any, Any] = {}

    def press(label: str) -> Any:
        button = gradio.Button(label, variant="primary")
        below[button] = gradio.Column(elem_classes="examples")
        return button

    def tiles(kind: str, columns: int, preview: bool) -> Any:
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

    def chosen(label: str, images: Sequence[Image.Image], visible: bool = True) -> Any:
        made = gradio.Image(
            images[0] if visible else None,
            type="filepath",
            image_mode=None,  # Gradio hands the file over as it came, and does not decode it
            label=label,
            sources=["upload", "clipboard"],
            format="png",
            height=260,
            visible=visible,
            elem_classes="image",
        )
        # Gradio would open the file first, and say nothing useful where it is no image.
        opened = made.preprocess
        made.preprocess = lambda given: (given and given.path) or opened(given)
        return made

    def typed(label: str, texts: Sequence[str]) -> Any:
        return gradio.Textbox(texts[0], label=label)

    def drawn() -> Any:
        return gradio.Image(
            show_label=False,
            interactive=False,
            format="png",
            min_width=140,
            buttons=[],
            elem_classes="image",
        )

    images, captions, phrases, questions = zip(*examples(tried.gallery), strict=True)
    others = [*images[1:], images[0]]
    with gradio.Blocks(title=f"Try {tried.name}", analytics_enabled=False) as blocks:
        gradio.Markdown(f"# Try `{tried.name}`\n{abilities(tried)}")
        with gradio.Row():
            image = chosen("Image", images)
            second = chosen("Second image, right of the first", others, tried.image_count == 2)
        if tried.gallery is not None:
            with gradio.Tab("Search"):
                wanted = typed(f"Look for, in {len(tried.gallery)} images", captions)
                button = press("Search")
                nearest = ", the four nearest with the probability of a match"
                gradio.Markdown(
                    f"The best first with similarity{nearest if tried.can_match else ''}; a click "
                    "makes one the image above."
                )
                found = tiles("found", 4, preview=False)

                def search(text: str) -> list[tuple[Image.Image, str]]:
                    return [(one.image, one.text) for one in tried.search(text)]

                action(button, "search", search, [wanted], [found], [captions])

                def choose(every: list[tuple[Image.Image, str]], event: Any) -> Image.Image:
                    return every[event.index][0]

                choose.__annotations__["event"] = gradio.SelectData
                found.select(choose, found, image, api_visibility="private")
        if (does := tried.action) is not None:
            with gradio.Tab(does.tab):
                inputs = [image, second][: tried.image_count]
                samples = [images, others][: tried.image_count]
                if does.text is not None:
                    texts = questions if does.name == "answer" else captions
                    inputs.append(typed(does.text, texts))
                    samples.append(texts)
                button = press(does.button)
                answers = gradio.Label(label=does.output)

                def act(*given: Any) -> dict[str, float]:
                    images, text = given, None
                    if does.text is not None:
                        images, text = given[:-1], given[-1]
                    return dict(tried.act(does.name, images, text))

                action(button, does.name, act, inputs, [answers], samples)
        if tried.can_match:
            with gradio.Tab("Match"):
                text = typed("Does this text belong to the image?", captions)
                button = press("Match")
                matched = gradio.Label(label="Match")
                action(
                    button,
                    "match",
                    lambda image, said: dict(tried.match(image, said)),
                    [image, text],
                    [matched],
                    [images, captions],
                )
            with gradio.Tab("Ground"):
                phrase = typed("Where is", phrases)
                button = press("Show")
                gradio.Markdown("The image, and Grad-CAM of the phrase, from blue (weak) to red.")
                with gradio.Row():
                    plain, heat = drawn(), drawn()
                action(
                    button,
                    "ground",
                    tried.ground,
                    [image, phrase],
                    [plain, heat],
                    [images, phrases],
                )
        with gradio.Tab("Anchors"):
            caption = typed("Caption", captions)
            button = press("Show")
            gradio.Markdown("For each word the share of channel groups that anchor a patch.")
            words = tiles("words", 6, preview=True)
            action(
                button,
                "anchors",
                lambda image, said: [(one.image, one.text) for one in tried.anchors(image, said)],
                [image, caption],
                [words],
                [images, captions],
            )
    return blocks


def abilities(tried: TryIt) -> str:
    """Return a line on the model's training and on requirements of other actions."""
    lacking = {
        "Search": None if tried.gallery is not None else "`--shards DIR`",
        "Match and Ground": None if tried.can_match else "a model trained by ITM",
    }
    for does, kinds in page_actions().items():
        own = tried.action is not None and tried.action.name == does.name
        lacking[does.tab] = None if own else f"a model fine-tuned for {' or '.join(kinds)}"
    trained = f"Fine-tuned for {tried.kind}." if tried.kind else "Pretrained."
    needs = ", ".join(f"{name} ({need})" for name, need in lacking.items() if need)
    return f"{trained} Not offered, with what it needs: {needs}."


def serve(tried: TryIt, host: str = HOST, port: int = PORT, block: bool = True) -> Any:
    """Serve the page without a public link, until interrupted (`block`) or in the background."""
    gradio, blocks = gradio_module(), page(tried)
    # The usual theme would fetch its fonts from a server.
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
        # Gradio asks for its own page, and wants a public link where a proxy answers instead.
        blocks.close()
        raise EvaluationError(
            f"the page at {host}:{port} does not answer; is a proxy in the way (set "
            f"NO_PROXY={host}), or the machine too busy?"
        ) from error
    return blocks


def gradio_module() -> Any:
    """Import Gradio without telemetry, with images in a folder of this user alone."""
    # Said before the import: Gradio asks its servers for its newest version and counts starts.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    if "GRADIO_TEMP_DIR" not in os.environ:
        # Its own choice, /tmp/gradio, belongs to its first user, and all may read uploads there.
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
