import numpy as np
import pytest
import torch
from PIL import Image

import vlp
from evaluation.__main__ import main
from evaluation.grounding.grounding import grad_cam
from evaluation.probes.anchor_maps import (
    AnchorMap,
    WordMap,
    anchor_details,
    anchor_maps,
    first_samples,
    read_pair,
)
from evaluation.probes.anchor_plots import draw_anchor_detail, draw_anchor_maps
from evaluation.samples import Samples
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel


def test_the_image_shows_heat_where_it_is(tmp_path):
    heat = np.zeros((2, 2), np.float32)
    none = WordMap("a", heat)
    full = WordMap("b", heat + 1, boxes=[(1, 1, 4, 4), (5, 5, 2, 2)])
    image = Image.new("RGB", (16, 16), (128, 128, 128))
    path = draw_anchor_maps(
        [AnchorMap(image, "a b", [none, full], 0.5)], tmp_path / "new" / "a.png"
    )
    drawn = np.asarray(Image.open(path).convert("RGB"), dtype=int)
    assert drawn.shape[1] > drawn.shape[0] > 100
    # The hottest colour of the map over pale grey, and only in one panel of three.
    warm = (drawn[..., 0] > 200) & (drawn[..., 2] < 200)
    columns = np.flatnonzero(warm[:, : int(0.9 * drawn.shape[1])].any(axis=0))
    assert columns.size > 50
    assert np.ptp(columns) < 0.35 * drawn.shape[1]


TEXT = "a bluered circle"  # the second word is several pieces


@pytest.fixture
def photo(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (30, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_details_equal_what_the_model_computes(model_folder, photo, tmp_path):
    loaded = vlp.load(model_folder)
    model = loaded.model
    model.anchor_threshold.fill_(0.1)
    (detail,) = anchor_details(loaded, [read_pair(photo, TEXT)])
    assert detail.words == ["a", "bluered", "circle"]
    pieces = loaded.text.pieces(TEXT)
    tokens = [[1], list(range(2, len(pieces) - 2)), [len(pieces) - 2]]
    assert len(tokens[1]) > 1

    with torch.no_grad():
        image = model.encode_image(loaded.preprocess(Image.open(photo))[None])
        text = model.encode_text(*loaded.text([TEXT]))
        field = model.anchor_paths(image, text)
        assert detail.match == pytest.approx(model.match(image, text).item(), abs=1e-6)
    maps = grad_cam(model, image, text, 0)[0].numpy()
    np.testing.assert_allclose(detail.gradcam_caption, maps[0], rtol=1e-5)
    assert maps[0].max() > 0
    some = set()
    for word, own in enumerate(tokens):
        np.testing.assert_allclose(detail.gradcam[word], maps[own].mean(0), rtol=1e-5)
        for group in range(2):
            part = slice(4 * group, 4 * group + 4)
            for patch in range(16):
                row, column = divmod(patch, 4)
                at = (word, group, row, column)
                a = image.tokens[0, patch, part]
                tokens_of_word = [text.tokens[0, token, part] for token in own]
                share = np.mean([float(a @ b / a.norm() / b.norm()) >= 0.1 for b in tokens_of_word])
                assert detail.anchors[at] == pytest.approx(share)
                reached = [token for token in own if field.reachable[0, patch, token, group]]
                assert detail.reachable[at] == bool(reached)
                some.add(bool(reached))
                paths = [float(field.image_path[0, 1 + patch, token, group]) for token in reached]
                expected = sum(paths) / max(len(paths), 1)
                assert detail.path[at] == pytest.approx(expected, rel=1e-5)
                assert not reached or detail.path[at] >= 1
    assert True in some


def test_out_of_reach_is_not_reachable(model_folder, photo):
    loaded = vlp.load(model_folder)
    loaded.model.anchor_threshold.fill_(1.1)  # no cosine is as large
    (detail,) = anchor_details(loaded, [read_pair(photo, TEXT)])
    assert not detail.anchors.any()
    assert not detail.reachable.any()
    assert not detail.path.any()


def with_position(loaded, *position):
    plain = loaded.model.config.model_dump()
    plain["cross"]["position"] = position
    model = VLPModel(ModelConfig.model_validate(plain)).eval()
    model.load_state_dict(loaded.model.state_dict(), strict=False)
    model.anchor_threshold.fill_(0.1)
    return loaded._replace(model=model)


def test_a_model_without_anchor_paths_has_anchors_and_gradcam(model_folder, photo, tmp_path):
    loaded = vlp.load(model_folder)
    sample = read_pair(photo, TEXT)
    (ace,) = anchor_details(with_position(loaded, "anchor"), [sample])
    (detail,) = anchor_details(with_position(loaded), [sample])
    np.testing.assert_array_equal(detail.anchors, ace.anchors)
    assert detail.anchors.any()
    assert detail.gradcam_caption.any()
    assert detail.path.shape == detail.reachable.shape == (3, 0, 4, 4)
    assert_drawn(draw_anchor_detail(detail, tmp_path / "a.png"))


def test_constant_paths_do_not_make_everything_an_anchor(model_folder, photo):
    loaded = vlp.load(model_folder)
    sample = read_pair(photo, TEXT)
    (ace,) = anchor_details(with_position(loaded, "anchor"), [sample])
    (uniform,) = anchor_details(with_position(loaded, "uniform"), [sample])
    np.testing.assert_array_equal(uniform.anchors, ace.anchors)
    assert uniform.reachable.all()
    assert (uniform.path == 1).all()


def test_details_of_shards_carry_boxes_and_leave_the_model_in_training(model_folder, scene_shards):
    loaded = vlp.load(model_folder)
    loaded.model.train()
    details = anchor_details(loaded, first_samples([scene_shards], 2))
    assert loaded.model.training
    words = [w for w in Samples([scene_shards]).read(0).annotation.words if w.caption == 0]
    boxes = {place: boxes for place, boxes in enumerate(details[0].boxes) if boxes}
    assert boxes == {word.index: (tuple(word.box),) for word in words}
    overview = anchor_maps(loaded, [scene_shards], count=2)
    for detail, row in zip(details, overview):
        assert detail.caption == row.caption
        assert detail.words == [word.word for word in row.words]
        assert detail.boxes == [word.boxes for word in row.words]
        for anchors, word in zip(detail.anchors, row.words):
            np.testing.assert_allclose(anchors.mean(0), word.heat)


def assert_drawn(path):
    drawn = np.asarray(Image.open(path).convert("RGB"))
    assert min(drawn.shape[:2]) > 200
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 100


def test_captions_that_look_like_formulas_or_have_no_end_are_drawn(model_folder, photo, tmp_path):
    (detail,) = anchor_details(vlp.load(model_folder), [read_pair(photo, TEXT)])
    words, caption = ["$x_{", "a" * 40, "^$"], "costs $x_{ and ^$ " * 40
    assert_drawn(
        draw_anchor_detail(detail._replace(words=words, caption=caption), tmp_path / "a.png")
    )
    image = Image.new("RGB", (4, 4))
    row = AnchorMap(image, "$x_{ ^$", [WordMap("$x_{$", np.ones((2, 2), np.float32))], 0.5)
    assert draw_anchor_maps([row], tmp_path / "b.png").is_file()


def test_an_image_and_a_text_give_a_grid(model_folder, photo, tmp_path, capsys):
    out = str(tmp_path / "out" / "a.png")
    command = ["anchors", "--model", str(model_folder), "--out", out]
    assert main([*command, "--image", str(photo), "--text", TEXT]) == 0
    assert capsys.readouterr().out.split() == [out]
    assert_drawn(out)


def test_a_text_longer_than_the_model_takes_is_cut_with_a_warning(model_folder, photo, caplog):
    loaded = vlp.load(model_folder)
    (fits,) = anchor_details(loaded, [read_pair(photo, " ".join(["circle"] * 22))])
    assert not caplog.messages
    (cut,) = anchor_details(loaded, [read_pair(photo, " ".join(["circle"] * 23))])
    assert caplog.messages == ["the text is longer than max_tokens: the model reads its beginning"]
    assert fits.words == cut.words == ["circle"] * 22
