"""Text assignment: two images and a caption of the first, of the second, or of neither.

ALBEF (section 5, NLVR2) prepares for statements about two images with it; any captioned shards
will do.
"""

from __future__ import annotations

import numpy as np

from vlp.data.downstream.images import ImagePreparation, decoded
from vlp.data.downstream.items import Item, Items
from vlp.data.downstream.pair_classification import PairDataset, PairExample, TextLabels
from vlp.data.schema import captions_of
from vlp.data.shards.sample_files import BadSample
from vlp.data.stream.map_dataset import RngFactory
from vlp.data.stream.rng import make_rng
from vlp.data.text.tokenizer import TextProcessor

FIRST, SECOND, NEITHER = range(3)
_UNUSED = TextLabels("caption", {})


class AssignmentDataset(PairDataset):
    """Captioned samples, each beside images of others; the class is the image of the caption.

    Args:
        items: captioned samples.
        text: tokenizer.
        prepare: images to pixels.
    """

    def __init__(self, items: Items, text: TextProcessor, prepare: ImagePreparation) -> None:
        super().__init__(items, _UNUSED, 2, 1, text, prepare)

    def make(self, item: Item, number: int, rng_for: RngFactory | None = None) -> PairExample:
        """Make an example of the caption of `item`, its image first, second or absent.

        Raises:
            BadSample: a drawn image cannot be used, or `item` has no caption.
        """
        rng = rng_for("assignment") if rng_for else make_rng(0, 0, number, "assignment")
        captions = captions_of(item.raw.annotation)
        if not captions:
            raise BadSample("no text", f"{item.where}: it has no caption")
        said = captions[int(rng.integers(len(captions)))]
        label = int(rng.integers(3))
        others: list[Item] = []
        for _ in range(2 if label == NEITHER else 1):
            others.append(self._other([item, *others], rng))
        shown = [item, *others] if label == FIRST else [*others, item]
        images = [decoded(one.raw, 1, one.where)[0] for one in shown[:2]]
        return PairExample(self.prepare(images, said, number, rng_for), self.text([said]), label)

    def _other(self, taken: list[Item], rng: np.random.Generator) -> Item:
        """Draw a sample of another image than those taken, as far as the annotations tell."""
        images = [_image(item) for item in taken]
        for _ in range(8):
            other = self.items.read(int(rng.integers(len(self.items))))
            if _image(other) not in images:
                return other
        raise BadSample("no text", f"{taken[0].where}: no other image was drawn beside it")


def _image(item: Item) -> tuple[str | None, str]:
    annotation = item.raw.annotation
    if annotation.image_id is None:
        return None, item.where
    return annotation.source, annotation.image_id
