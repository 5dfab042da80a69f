import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pretraining_batch import ROWS, batch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests_support import TINY_MODEL, tiny_text

import vlp
import vlp.objectives.config as objectives_config
from vlp.config import ConfigError
from vlp.data.stream.batch import Batch
from vlp.models.config import ModelConfig
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.itm import hard_negatives
from vlp.tasks.pretraining import Pretraining, register_objective
from vlp.tasks.pretraining import objectives as objective
from vlp.tasks.pretraining import task as pretraining_task

ALL = {"itm": {"group": 8}, "teacher": None}
PROJECTIONS = {"image_tokens", "text_tokens"}
TENSORS = Batch._fields.index("word_patches")  # fields that every batch has


def task(objectives=ALL, precision="float32", vocabulary="unused", init_from=None, **model):
    torch.manual_seed(1)
    config = ModelConfig.model_validate(TINY_MODEL | model)
    settings = ObjectivesConfig.model_validate(objectives)
    built = Pretraining(config, settings, vocabulary, precision, log_every=1, init_from=init_from)
    for name, parameter in built.named_parameters():
        if "table" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return built


def test_itm_of_lists_ranks_a_matching_pair_among_its_negatives():
    built = task({**ALL, "itm": {"group": 8, "listwise": 3}}).eval()
    one = batch()
    text = built.model.encode_text(one.text_ids, one.attention_mask, one.word_mask)
    image = built.model.encode_image(one.pixels)
    similarity = image.feature @ text.feature.T / built.model.temperature()
    drawn = hard_negatives(similarity, one.pair_ids, one.valid, one.uniform, 8, 3)
    expected = torch.tensor(0.0)
    for row in range(ROWS):
        pick = slice(3 * row, 3 * row + 3)
        texts = torch.cat([torch.tensor([row]), drawn.text_for_image[pick]])
        images = torch.cat([torch.tensor([row]), drawn.image_for_text[pick]])
        own = torch.full((4,), row)
        for pairs in ((own, texts), (images, own)):
            odds = built.model.match(image.select(pairs[0]), text.select(pairs[1]))
            expected = expected - odds.log_softmax(0)[0]
    loss = built(one, 0).losses["itm"]
    torch.testing.assert_close(loss, expected / (2 * ROWS), rtol=1e-4, atol=1e-4)


def test_total_is_the_weighted_sum():
    weights = {"contrastive": {"weight": 2.0}, "itm": {"group": 8, "weight": 0.5}}
    output = task(ALL | weights)(batch(), 0)
    factors = {"contrastive": 2, "phrase": 2, "itm": 0.5}
    expected = sum(factors.get(name, 1) * loss for name, loss in output.losses.items())
    torch.testing.assert_close(output.loss.detach(), expected)


def test_pixels_predicted_from_the_cross_modal_output_read_the_text():
    """papers.md#ace-a30, the other option: masked patches meet the clean text (and its paths)."""
    given, other = batch(), batch()
    other = other._replace(text_ids=other.text_ids.roll(1, 0).where(other.attention_mask, 0))
    for output in ("image", "cross"):
        built = task(ALL | {"mim": {"output": output}})
        losses = [built(each, 0).losses["mim"] for each in (given, other)]
        assert torch.equal(*losses) == (output == "image")


def test_pixels_behind_the_mask_are_not_seen_through_the_cross_modal_encoder():
    built = task(ALL | {"mim": {"output": "cross"}}).eval()  # the threshold follows clean images
    given = batch()
    hidden = given.mim_mask.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    states = []
    built.mim_head.register_forward_hook(lambda module, given, out: states.append(out))
    built(given, 0)
    built(given._replace(pixels=torch.where(hidden, 0.5, given.pixels)), 0)
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("objectives", "trained"),
    [
        ({}, {"cross_encoder", "match_head"} | PROJECTIONS),
        ({"itm": None, "mlm": None, "mim": None}, PROJECTIONS),
        ({"itm": None, "mlm": None, "contrastive": {"kind": "paper"}}, PROJECTIONS),
        ({"itm": None, "mlm": None, "contrastive": {"kind": "itc"}}, set()),
        ({"itm": None, "mlm": None, "mim": {"output": "cross"}}, {"cross_encoder"} | PROJECTIONS),
        ({"itm": None, "mim": None}, {"cross_encoder"} | PROJECTIONS),
        ({"mlm": None, "mim": None}, {"cross_encoder", "match_head"} | PROJECTIONS),
        (
            {"mlm": None, "mim": None, "contrastive": {"kind": "itc"}},
            {"cross_encoder", "match_head"},
        ),
    ],
)
def test_parts_that_nothing_trains_are_frozen_so_that_they_do_not_decay(objectives, trained):
    """DeepSpeed gives parameters without a gradient one of zeros, and AdamW then shrinks them."""
    built = task(ALL | objectives)
    for part in {"cross_encoder", "match_head"} | PROJECTIONS:
        found = {one.requires_grad for one in getattr(built.model, part).parameters()}
        assert found == {part in trained}
    built(batch(), 0).loss.backward()
    for name, one in built.named_parameters():
        if one.ndim > 1:  # others do not decay
            assert (one.grad is not None) == one.requires_grad, name


def test_two_ranks_draw_the_negatives_of_one():
    """The pairs that enter the cross-modal encoder, as (text, image) ids, rank by rank."""
    built = task(ALL | {"itm": {"group": 4}, "mlm": None, "mim": None})
    cross = built.model.cross
    drawn = []

    def record(image, text, pairs, **options):
        drawn.append(pairs)
        return cross(image, text, pairs, **options)

    built.model.cross = record
    whole = batch()._replace(image_ids=torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]))
    for share in (slice(None), slice(0, 4), slice(4, 8)):  # 1 rank x 8, then 2 ranks x 4
        built(Batch(*(field[share] for field in whole[:TENSORS])), 0)
    one, first, second = (
        torch.stack([pairs.texts, pairs.images]).view(2, 3, -1) for pairs in drawn
    )
    assert torch.equal(one, torch.cat([first, second + 4], dim=-1))
    assert not torch.equal(one[0, 1], one[0, 0])  # something was drawn


def test_empty_slots_count_nowhere():
    full, short = batch(), batch()
    garbage = batch(seed=9)
    keep = torch.tensor([True] * 5 + [False] * 3)

    def mixed(good, bad):
        shape = (-1,) + (1,) * (good.dim() - 1)
        return torch.where(keep.view(shape), good, bad)

    holed = Batch(
        *(mixed(good, bad) for good, bad in zip(full[:TENSORS], garbage[:TENSORS], strict=True))
    )._replace(valid=keep, image_ids=full.image_ids)
    cut = Batch(*(field[:5] for field in short[:TENSORS]))
    built = task(ALL | {"contrastive": {"token": {"group": 8}}}).eval()  # the threshold rests
    with torch.no_grad():
        expected, seen = built(cut, 0), built(holed, 0)
    for name, loss in expected.losses.items():
        torch.testing.assert_close(seen.losses[name], loss, rtol=1e-4, atol=1e-5, msg=name)


def test_the_running_threshold_is_the_quantile_and_rests_in_evaluation():
    built = task()
    built(batch(), 0)
    first = built.model.anchor_threshold.clone()
    clean = built.model.encode_image(batch().pixels)
    text = built.model.encode_text(batch().text_ids, batch().attention_mask, batch().word_mask)
    similarity = built.model.anchor_paths(clean, text).similarity.transpose(1, 2)[batch().word_mask]
    assert float((similarity < first).float().mean()) == pytest.approx(0.9, abs=0.01)
    built(batch(seed=4), 1)
    assert built.model.anchor_threshold != first
    moved = built.model.anchor_threshold.clone()
    built.eval()
    built(batch(seed=5), 2)
    assert torch.equal(built.model.anchor_threshold, moved)


def test_a_fixed_threshold_stays():
    cross = TINY_MODEL["cross"] | {"options": {"anchor": {"threshold": 0.05}}}
    built = task(cross=cross)
    built(batch(), 0)
    assert float(built.model.anchor_threshold) == pytest.approx(0.05)


WITH_TEACHER = ALL | {"teacher": {"queue": 12, "momentum": 0.5, "warmup_steps": 0}}


def test_the_teacher_moves_only_after_a_step_and_fills_the_queue():
    built = task(WITH_TEACHER)
    start = built.teacher.average.module["model"].match_head.weight.clone()
    built(batch(), 0).loss.backward()
    assert built.teacher.queue.filled == 0
    with torch.no_grad():
        built.model.match_head.weight.add_(1)
    built.after_step(lambda: dict(built.named_parameters()))
    torch.testing.assert_close(built.teacher.average.module["model"].match_head.weight, start + 0.5)
    assert built.teacher.queue.filled == ROWS
    assert "teacher" not in " ".join(name for name, _ in built.named_parameters())


def test_keys_of_a_skipped_step_are_not_pushed():
    built = task(WITH_TEACHER)
    built(batch(), 0)
    built(batch(seed=1), 1)
    built.after_step(lambda: dict(built.named_parameters()))
    assert built.teacher.queue.filled == ROWS


def test_extra_state_restores_teacher_and_queue():
    built = task(WITH_TEACHER)
    built(batch(), 0)
    built.after_step(lambda: dict(built.named_parameters()))
    other = task(WITH_TEACHER)
    other.load_state_dict(built.state_dict())
    other.load_extra_state({name: value.clone() for name, value in built.extra_state().items()})
    with torch.no_grad():
        mine, theirs = built(batch(seed=2), 1), other(batch(seed=2), 1)
    assert torch.equal(mine.loss, theirs.loss)
    assert task().extra_state() == {}


def test_soft_targets_change_the_loss_by_their_share(monkeypatch):
    hard, soft = task(WITH_TEACHER), task(WITH_TEACHER)
    with torch.no_grad():
        mixed = soft(batch(), 0)
        monkeypatch.setattr("vlp.tasks.teacher.SOFT_SHARE", 0.0)
        plain = hard(batch(), 0)
    for name in ("contrastive", "mlm"):
        assert not torch.isclose(plain.losses[name], mixed.losses[name])
    for name in ("token", "word", "itm", "mim"):
        assert torch.equal(plain.losses[name], mixed.losses[name])
    with torch.no_grad():
        plain = hard.eval()(batch(), 0).losses
        monkeypatch.undo()
        mixed = soft.eval()(batch(), 0).losses
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)


def test_a_held_out_loss_does_not_rise_while_the_queue_fills():
    built = task(WITH_TEACHER).eval()
    with torch.no_grad():
        before = built(batch(), 0)
        built.train()(batch(seed=1), 0)
        built.after_step(lambda: dict(built.named_parameters()))
        after = built.eval()(batch(), 0)
    assert built.teacher.queue.filled == ROWS
    torch.testing.assert_close(after.losses["contrastive"], before.losses["contrastive"])


def test_a_frozen_tower_averages_flips_in_evaluation_alone():
    image = TINY_MODEL["image"] | {"trainable": 0, "average_hflip": True}
    built = task(ALL | {"mim": None}, image=image)
    seen = []
    after = built.model.image_encoder.after_tower
    built.model.image_encoder.after_tower = lambda states: seen.append(states) or after(states)
    with torch.no_grad():
        for training in (True, False):
            built.train(training)(batch(), 0)
    encoder, pixels = built.model.image_encoder, batch().pixels
    torch.testing.assert_close(seen[0], encoder.tower(pixels))
    torch.testing.assert_close(seen[-1], encoder.hflip_averaged_tower(pixels))
    assert not torch.allclose(seen[0], seen[-1])


def test_bf16_stays_near_float32():
    with torch.no_grad():
        exact, mixed = task()(batch(), 0), task(precision="bf16")(batch(), 0)
    for name, loss in exact.losses.items():
        assert mixed.losses[name].dtype == torch.float32
        torch.testing.assert_close(mixed.losses[name], loss, rtol=0.05, atol=0.05)


def test_the_saved_model_is_the_trained_one(tmp_path):
    tiny_text().save(tmp_path / "words")
    built = task(vocabulary=str(tmp_path / "words"))
    built(batch(), 0)
    built.save_model(tmp_path / "model", built.state_dict())
    loaded = vlp.load(tmp_path / "model").model
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_start_brings_its_heads_to_student_and_teacher(tmp_path):
    tiny_text().save(tmp_path / "words")
    before = task(vocabulary=str(tmp_path / "words"))
    with torch.no_grad():
        for head in (before.mlm_head, before.mim_head):
            for parameter in head.parameters():
                parameter.normal_()
    before.save_model(tmp_path / "model", before.state_dict())
    start = str(tmp_path / "model")
    built = task(ALL | {"mim": {"output": "cross"}, "teacher": {"queue": 8}}, init_from=start)
    teacher = built.teacher.average.module["mlm_head"].state_dict()
    for name, tensor in before.mlm_head.state_dict().items():
        assert torch.equal(built.mlm_head.state_dict()[name], tensor)
        assert torch.equal(teacher[name], tensor)
    assert len(built.weight_reports) == 2
    assert str(built.weight_reports[1]).startswith(f"{start}/heads.safetensors: ")
    assert not built.weight_reports[1].unused
    text = TINY_MODEL["text"] | {"weights": "nobody/nowhere"}  # not read
    without = task(ALL | {"mim": None}, init_from=start, text=text)
    assert {name.partition(".")[0] for name in without.weight_reports[1].unused} == {"mim_head"}
    (tmp_path / "model" / "heads.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"heads\.safetensors"):
        task(init_from=start)
    (tmp_path / "model" / "heads.safetensors").unlink()
    assert len(task(init_from=start).weight_reports) == 1


def test_a_head_of_another_shape_keeps_its_own_start(tmp_path):
    tiny_text().save(tmp_path / "words")
    before = task(vocabulary=str(tmp_path / "words"))
    before.save_model(tmp_path / "model", before.state_dict())
    file = tmp_path / "model" / "heads.safetensors"
    heads = load_file(file)
    name = next(name for name in heads if name.startswith("mim_head."))
    save_file(heads | {name: torch.zeros(3)}, file)
    (_, report) = task(init_from=str(tmp_path / "model")).weight_reports
    assert (report.missing, report.unused) == ([name], [name])


PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "add-an-objective.md"


@pytest.fixture
def page(monkeypatch):
    """The how-to page's module, whose registrations end with the test."""
    monkeypatch.setattr(objective, "OBJECTIVES", dict(objective.OBJECTIVES))
    monkeypatch.setattr(objectives_config, "_registered_settings", {})
    monkeypatch.setattr(pretraining_task, "OBJECTIVES", objective.OBJECTIVES)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page = ModuleType("my_objective")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # where its annotations are looked up
    exec(compile(code, PAGE, "exec"), page.__dict__)
    return page


def test_the_objective_of_the_page_is_trained(page):
    built = task({"contrastive": None, "itm": None, "mim": None, "teacher": None,
                  "feature_norm": {"weight": 0.2}})  # fmt: skip
    given = batch()._replace(valid=torch.arange(ROWS) < 5)
    output = built(given, 0)
    states = built.model.encode_image(given.pixels).states[:5]
    torch.testing.assert_close(output.losses["feature_norm"], states.square().mean().detach())
    expected = output.losses["mlm"] + 0.2 * output.losses["feature_norm"]
    torch.testing.assert_close(output.loss.detach(), expected)
    output.loss.backward()
    assert built.model.image_encoder.vit.norm.weight.grad.any()


def test_settings_of_a_registered_objective_are_checked(page):
    alone = {"contrastive": None, "itm": None, "mlm": None, "mim": None}
    config = ObjectivesConfig.model_validate(alone | {"feature_norm": {"weight": 2}})
    assert config.feature_norm == page.FeatureNormConfig(weight=2.0)
    assert ObjectivesConfig.model_validate(config.model_dump(mode="json")) == config
    for wrong, key in (
        ({"toys": {}}, "toys"),
        ({"feature_norm": {"wait": 1}}, "feature_norm.wait"),
    ):
        with pytest.raises(ValidationError) as caught:
            ObjectivesConfig.model_validate(wrong)
        (problem,) = caught.value.errors()
        assert (".".join(problem["loc"]), problem["type"]) == (key, "extra_forbidden")
    with pytest.raises(ValueError, match="registered already"):
        register_objective("feature_norm", page.FeatureNorm)
    with pytest.raises(ValueError, match=r"objectives\.mlm is a key already"):
        objectives_config.register_settings("mlm", page.FeatureNormConfig)
