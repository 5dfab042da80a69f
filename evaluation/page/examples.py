"""Examples of the page: samples of the gallery, or generated scenes without a gallery."""

from __future__ import annotations

from collections.abc import Iterator

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


def examples(gallery: Gallery | None) -> list[tuple[Image.Image, str, str, str]]:
    """Return images, each with a caption, a phrase for one object, and a question.

    Images are spaced evenly over the gallery; without a gallery, they are generated scenes.
    """
    return [
        (image, caption, _phrase(annotation, caption), _question(annotation))
        for image, caption, annotation in (
            _scenes() if gallery is None else _gallery_samples(gallery)
        )
    ]


def _gallery_samples(gallery: Gallery) -> Iterator[tuple[Image.Image, str, Annotation]]:
    for index in range(0, len(gallery), -(-len(gallery) // COUNT)):
        sample = gallery.image(index)
        image = sample.image.copy()
        image.thumbnail((SIDE, SIDE))
        yield image, sample.captions[0], sample.annotation


def _scenes() -> Iterator[tuple[Image.Image, str, Annotation]]:
    for scene in distinct_scenes(0, COUNT):
        annotation = annotate(scene)
        yield render(scene), texts_of(annotation)[0], annotation


def _phrase(annotation: Annotation, caption: str) -> str:
    return next(iter(texts_of(annotation, "expressions")), caption)


def _question(annotation: Annotation) -> str:
    return annotation.questions[0].question if annotation.questions else "what is in the image?"
