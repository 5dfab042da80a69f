import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_shards import annotated_shards, tiny_folder

import vlp
from evaluation.grounding import grounding as module
from evaluation.grounding.grounding import evaluate_grounding, grad_cam
from evaluation.options import EvalOptions
from evaluation.samples import EvaluationError
from vlp.config import ConfigError
from vlp.data.image.decode import decode_image
from vlp.data.schema import Annotation, Expression
from vlp.data.text.word_boxes import patches_in_box
from vlp.scenes.annotation import annotation
from vlp.scenes.render import encode_png, render
from vlp.scenes.sample import sample_scene
from vlp.tasks.grounding.metrics import box_scores, intersection_over_union

SCENE = sample_scene(0, 3, image_size=32)
IMAGE = encode_png(render(SCENE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def shards(tmp_path):
    scenes = [annotation(sample_scene(0, number, image_size=32)) for number in range(4)]
    return annotated_shards(tmp_path / "shards", scenes, IMAGE)


def test_the_map_is_grad_cams_mean_over_the_text(folder, shards):
    loaded = vlp.load(folder)
    result = evaluate_grounding(loaded, [shards], options=EvalOptions(batch=3))
    row = result.predictions[0]
    image = loaded.model.encode_image(loaded.preprocess(decode_image(IMAGE, ""))[None])
    text = loaded.model.encode_text(*loaded.text([row["text"]]))
    maps = grad_cam(loaded.model, image, text)[0]
    heat = maps[text.attention_mask[0]].mean(0).detach().numpy()
    best = np.unravel_index(heat.argmax(), heat.shape)
    side = 32 / heat.shape[0]
    assert row["point"] == [(best[1] + 0.5) * side, (best[0] + 0.5) * side]


def test_only_the_first_words_make_the_map_where_asked(folder, shards):
    loaded = vlp.load(folder)
    rows = evaluate_grounding(loaded, [shards], by="similarity", head=2).predictions
    image = loaded.model.encode_image(loaded.preprocess(decode_image(IMAGE, ""))[None])
    for row in rows:
        text = loaded.model.encode_text(*loaded.text([row["text"]]))
        heat = (image.tokens[0].double() @ text.tokens[0, 1:3].double().mT).mean(-1)
        best = np.unravel_index(int(heat.argmax()), (4, 4))
        assert row["point"] == [(best[1] + 0.5) * 8, (best[0] + 0.5) * 8]
    every = [evaluate_grounding(loaded, [shards], head=head) for head in (None, 1)]
    points = [[row["point"] for row in result.predictions] for result in every]
    assert points[1] != points[0]
    assert "first 1 word pieces" in every[1].notes[0]
    with pytest.raises(EvaluationError, match="head 0: the map needs"):
        evaluate_grounding(loaded, [shards], head=0)
    with pytest.raises(EvaluationError, match=r"no Grad-CAM map in the last"):
        evaluate_grounding(loaded, [shards], head=1, layer=-1)


def test_pointing_counts_hits_in_the_named_box(folder, shards):
    result = evaluate_grounding(vlp.load(folder), [shards], by="similarity")
    scenes = [annotation(sample_scene(0, n, image_size=32)) for n in range(4)]
    every = [one for scene in scenes for one in scene.expressions]
    assert [row["id"] for row in result.predictions] == [one.id for one in every]
    shares = [patches_in_box(one.box, (4, 4), (32, 32)).mean() for one in every]
    assert result.figures["pointing"].chance == pytest.approx(np.mean(shares))
    assert "IoU ≥ 0.5" not in result.figures


def test_a_map_below_zero_has_a_highest_patch_too(folder, tmp_path, monkeypatch):
    heat = np.full((1, 4, 4), -0.5)
    heat[0, 1, 2] = -0.1  # 16 to 24 px across, 8 to 16 down
    monkeypatch.setattr(module, "_maps", lambda *arguments: heat)
    box, far = [16.0, 8.0, 8.0, 8.0], [0.0, 16.0, 8.0, 8.0]
    says = [Expression(id="1", text="a red circle", box=box)]
    annotations = [Annotation(expressions=says, proposals=[far, box])]
    shards = annotated_shards(tmp_path / "shards", annotations, IMAGE)
    result = evaluate_grounding(vlp.load(folder), [shards], by="similarity")
    assert result.figures["pointing"].value == 1
    assert result.predictions[0]["box"] == box


def test_a_fine_tuned_folder_is_evaluated_as_it_was_chosen(folder, shards, tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    asked = evaluate_grounding(vlp.load(folder), [shards], by="similarity", head=2)
    (tuned / "grounding.json").write_text('{"by": "similarity", "layer": null, "head": 2}')
    found = evaluate_grounding(vlp.load(tuned), [shards])
    assert (found.notes, found.predictions) == (asked.notes, asked.predictions)
    named = evaluate_grounding(vlp.load(tuned), [shards], by="similarity")
    assert named.predictions == asked.predictions  # to name what holds changes nothing
    other = evaluate_grounding(vlp.load(tuned), [shards], by="gradcam")
    assert other.notes == evaluate_grounding(vlp.load(folder), [shards]).notes
    (tuned / "grounding.json").write_text('{"by": "guess"}')
    with pytest.raises(ConfigError, match=r"grounding\.json: 'by'"):
        evaluate_grounding(vlp.load(tuned), [shards])


def test_proposals_are_evaluated_by_their_overlap(folder, tmp_path):
    box = [4.0, 4.0, 12.0, 12.0]
    far = [20.0, 20.0, 8.0, 8.0]
    says = [Expression(id="1", text="a red circle", box=box)]
    annotations = [
        Annotation(expressions=says, proposals=[box, far]),
        Annotation(expressions=says, proposals=[far]),
        Annotation(expressions=says),
    ]
    shards = annotated_shards(tmp_path / "shards", annotations, IMAGE)
    figures = evaluate_grounding(vlp.load(folder), [shards]).figures
    assert figures["best possible"].value == pytest.approx(0.5)
    assert figures["IoU ≥ 0.5"].chance == pytest.approx(0.25)
    assert figures["IoU ≥ 0.5"].value in (0, 0.5)


def test_bad_expressions_are_counted(folder, tmp_path):
    boxes = [[0.0, 0, 5, 5], [1.0, 1, 0, 4], [40.0, 40, 5, 5], [-5.0, -5, 9, 9], [-9.0, 0, 9, 9]]
    says = [Expression(id=str(n), text="a red circle", box=box) for n, box in enumerate(boxes)]
    annotations = [Annotation(expressions=says), Annotation(caption="nothing is asked")]
    shards = annotated_shards(tmp_path / "shards", annotations, IMAGE)
    result = evaluate_grounding(vlp.load(folder), [shards])
    assert result.skipped == {"bad annotation": 3}
    assert [row["id"] for row in result.predictions] == ["0", "3"]  # annotations cross the border


SIZE = 24, 16


@st.composite
def boxes(draw):
    x, y = draw(st.integers(0, SIZE[0] - 1)), draw(st.integers(0, SIZE[1] - 1))
    return [x, y, draw(st.integers(1, SIZE[0] - x)), draw(st.integers(1, SIZE[1] - y))]


def mask(box):
    x, y, width, height = box
    covered = np.zeros(SIZE[::-1], dtype=bool)
    covered[y : y + height, x : x + width] = True
    return covered


@given(st.lists(boxes(), min_size=1, max_size=4), boxes())
def test_overlap_is_that_of_the_pixels(many, other):
    found = intersection_over_union(np.array(many, dtype=float), other)
    expected = [(mask(b) & mask(other)).sum() / (mask(b) | mask(other)).sum() for b in many]
    np.testing.assert_allclose(found, expected)


@given(st.lists(boxes(), min_size=1, max_size=4), st.integers(0, 10))
def test_a_boxs_score_is_the_sum_of_its_pixels_over_the_root_of_its_area(many, seed):
    heat = np.random.default_rng(seed).random((4, 3))
    pixels = np.kron(heat, np.ones((4, 8)))
    expected = [pixels[mask(box)].sum() / np.sqrt(box[2] * box[3]) for box in many]
    np.testing.assert_allclose(box_scores(heat, np.array(many, dtype=float), SIZE), expected)


def test_what_lies_outside_or_has_no_area_counts_nothing():
    heat = np.ones((2, 2))
    found = box_scores(heat, np.array([[-4.0, 0, 8, 4], [3, 3, 0, 5], [100, 100, 5, 5]]), (8, 8))
    np.testing.assert_allclose(found, [16 / np.sqrt(32), 0, 0])
    nothing = intersection_over_union(np.array([[1.0, 1, 0, 0]]), [1, 1, 0, 0])
    assert nothing.tolist() == [0]
