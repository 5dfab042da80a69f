from __future__ import annotations

from vlp.scenes.captions import captions
from vlp.scenes.distinct import ambiguous_share, distinct_scenes
from vlp.scenes.meaning import holds
from vlp.scenes.sample import sample_scene
from vlp.scenes.splits import split_of


def _share(scenes) -> float:
    """Every caption against every other scene."""
    fits = [
        any(holds(caption.meaning, other, lenient=True) for other in scenes if other is not scene)
        for scene in scenes
        for caption in captions(scene)
    ]
    return sum(fits) / len(fits)


def test_no_caption_fits_a_second_scene() -> None:
    scenes = list(distinct_scenes(0, 96))
    assert _share(scenes) == 0
    assert ambiguous_share(scenes) == 0
    assert {split_of(scene) for scene in scenes} == {"val"}


def test_scenes_drawn_without_a_look_at_each_other_do_clash() -> None:
    scenes = [sample_scene(0, index, "val") for index in range(120)]
    share = ambiguous_share(scenes)
    assert share == _share(scenes)
    assert share > 0.02


def test_redrawing_keeps_the_number_of_objects_and_the_prefix() -> None:
    scenes = list(distinct_scenes(0, 64))
    assert scenes[:20] == list(distinct_scenes(0, 20))
    for index, scene in enumerate(scenes):
        assert len(scene.objects) == len(sample_scene(0, index, "val").objects)


def test_an_empty_list_is_not_ambiguous() -> None:
    assert ambiguous_share([]) == 0
