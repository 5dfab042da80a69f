"""Images with hypotheses: entailment, contradiction or neutral, like SNLI-VE's.

A curtain hides one place of every image; hypotheses about that place are neutral.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from vlp.data.stream.rng import make_rng
from vlp.scenes.captions import PLACE_WORDS, article, captions
from vlp.scenes.expressions import noun_words
from vlp.scenes.graph import COLOURS, PLACES, SHAPES, ObjectPhrase, Scene
from vlp.scenes.render import cover_box
from vlp.scenes.sample import Split, sample_scene

Label = Literal["entailment", "neutral", "contradiction"]
LABELS: tuple[Label, ...] = ("entailment", "neutral", "contradiction")

_MAX_ATTEMPTS = 10_000


class SnliVeTriple(NamedTuple):
    """An image with a curtain, a caption of its visible part, a hypothesis and its label."""

    key: str
    scene: Scene
    premise: str
    hypothesis: str
    label: Label


def sample_triple(
    seed: int, index: int, split: Split = "train", image_size: int = 64
) -> SnliVeTriple:
    """Draw triple `index`; its image is a scene of the split."""
    key = f"entailment-{split}-{seed}-{index}"
    rng = make_rng(seed, 0, key, "entailment")
    # Drawn before the image, so that neither hypothesis nor curtain alone predicts the label.
    noun, hypothesis = _hypothesis(rng)
    label = LABELS[int(rng.integers(len(LABELS)))]
    for _ in range(_MAX_ATTEMPTS):
        bare = sample_scene(seed, int(rng.integers(1 << 40)), split, image_size)
        free = [place for place in PLACES if hides_nothing(bare, place)]
        if not free:
            continue
        scene = bare._replace(cover=free[int(rng.integers(len(free)))])
        if label_of(noun, scene) == label:
            return SnliVeTriple(key, scene, captions(scene, 1)[0].text, hypothesis, label)
    raise RuntimeError(f"no scene of split {split!r} makes {hypothesis!r} {label}")


def label_of(noun: ObjectPhrase, scene: Scene) -> Label | None:
    """Return the label of "there is NOUN at PLACE" for an image with a curtain; None if vague."""
    if any(noun.fits(obj) for obj in scene.objects):
        return "entailment"
    if any(noun.fits(obj, lenient=True) for obj in scene.objects):
        return None
    if noun.place == scene.cover:
        return "neutral"
    # 'at the top' may include a hidden 'top left'.
    vague = scene.cover is not None and noun.place in scene.cover.split(" ")
    return None if vague else "contradiction"


def hides_nothing(scene: Scene, place: str) -> bool:
    """Return whether a curtain over the place would overlap no object."""
    x, y, width, height = cover_box(place, scene.image_size)
    return not any(
        x < obj.box[0] + obj.box[2]
        and obj.box[0] < x + width
        and y < obj.box[1] + obj.box[3]
        and obj.box[1] < y + height
        for obj in scene.objects
    )


def _hypothesis(rng: np.random.Generator) -> tuple[ObjectPhrase, str]:
    place = PLACES[int(rng.integers(len(PLACES)))]
    colour = COLOURS[int(rng.integers(len(COLOURS)))]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    form = int(rng.integers(3))
    noun = ObjectPhrase(
        shape=shape if form != 1 else None, colour=colour if form != 0 else None, place=place
    )
    words = noun_words(noun)
    wording = PLACE_WORDS[place][int(rng.integers(3))]
    return noun, f"there is {article(words)} {words} {wording}"
