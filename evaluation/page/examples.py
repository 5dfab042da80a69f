"""Examples of the page: samples of the gallery, or generated scenes without a gallery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from PIL import Image

from evaluation.retrieval.gallery import Gallery
from vlp.data.schema import Annotation, texts_of
from vlp.scenes.annotation import annotation as annotate
from vlp.scenes.render import render
from vlp.scenes.sample import distinct_scenes

# Few, so that the answer below the examples stays on the screen.
COUNT = 3

# Maximum side in pixels: the browser loads all examples before it shows the page.
SIDE = 640


class Example(NamedTuple):
    """An image with a caption, a phrase for one object, and a question."""

    image: Image.Image
    caption: str
    phrase: str
    question: str


def examples(gallery: Gallery | None, count: int = COUNT) -> list[Example]:
    """Return examples of a gallery, evenly spaced, or of generated scenes if it is None."""
    return [
        Example(image, caption, _phrase(annotation, caption), _question(annotation))
        for image, caption, annotation in (
            _scenes(count) if gallery is None else _gallery_samples(gallery, count)
        )
    ]


def _gallery_samples(gallery: Gallery, count: int) -> Iterator[tuple[Image.Image, str, Annotation]]:
    for index in range(0, len(gallery), -(-len(gallery) // count)):
        sample = gallery.image(index)
        image = sample.image.copy()
        image.thumbnail((SIDE, SIDE))
        yield image, sample.captions[0], sample.annotation


def _scenes(count: int) -> Iterator[tuple[Image.Image, str, Annotation]]:
    for scene in distinct_scenes(0, count):
        annotation = annotate(scene)
        yield render(scene), texts_of(annotation)[0], annotation


def _phrase(annotation: Annotation, caption: str) -> str:
    return next(iter(texts_of(annotation, "expressions")), caption)


def _question(annotation: Annotation) -> str:
    return annotation.questions[0].question if annotation.questions else "what is in the image?"
