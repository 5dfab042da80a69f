"""Scenes for retrieval: no caption of one of them is true of another.

A retrieval score counts a caption's own image as the one right answer, so a caption that fits a
second image would make a right answer count as wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vlp.scenes.captions import SceneCaption, captions
from vlp.scenes.graph import Scene
from vlp.scenes.meaning import holds
from vlp.scenes.sample import FULL, Variety, sample_scene
from vlp.scenes.splits import Split

MAX_ATTEMPTS = 200


def distinct_scenes(
    seed: int,
    count: int,
    split: Split = "val",
    image_size: int = 64,
    variety: Variety = FULL,
) -> Iterator[Scene]:
    """Draw scenes 0 .. count - 1 of a split such that their captions tell them apart.

    A scene that clashes with an earlier one is drawn again with as many objects, so the mix of
    scenes stays as it is. Where `MAX_ATTEMPTS` are not enough (a pool too large for what the
    captions can say) the last draw stays; `ambiguous_share` says how many captions that concerns.
    """
    scenes: list[Scene] = []
    written: list[list[SceneCaption]] = []
    for index in range(count):
        for attempt in range(MAX_ATTEMPTS):
            scene = sample_scene(seed, index, split, image_size, attempt, variety=variety)
            texts = captions(scene)
            clash = any(
                _any_true(texts, other) or _any_true(others, scene)
                for other, others in zip(scenes, written, strict=True)
            )
            if not clash:
                break
        scenes.append(scene)
        written.append(texts)
        yield scene


def ambiguous_share(scenes: Sequence[Scene]) -> float:
    """Share of all captions that, read leniently, are true of another scene of the list as well."""
    ambiguous = total = 0
    for number, scene in enumerate(scenes):
        for caption in captions(scene):
            total += 1
            ambiguous += any(
                _any_true([caption], other)
                for position, other in enumerate(scenes)
                if position != number
            )
    return ambiguous / max(total, 1)


def _any_true(texts: Sequence[SceneCaption], scene: Scene) -> bool:
    looks = {(obj.shape, obj.colour) for obj in scene.objects}
    return any(
        # Every caption names each object's shape and colour, which rules out most scenes at once.
        all((noun.shape, noun.colour) in looks for noun in caption.meaning.nouns)
        and holds(caption.meaning, scene, lenient=True)
        for caption in texts
    )
