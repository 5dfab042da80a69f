import numpy as np
import pytest
import torch
from pair_shards import entailment_shards, statement_shards, tiny_folder
from PIL import Image
from question_shards import AUGMENT, coloured, toy_parts, write_shards
from safetensors.torch import load_file, save_file
from tests_support import first_batch

from vlp.config import ConfigError
from vlp.models.folder import WEIGHTS, from_pretrained
from vlp.tasks import vision_only
from vlp.tasks.downstream.registry import get_task
from vlp.tasks.downstream.task import DELTA, load_task, start_parts

BATCH = 4
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
PLAIN = {"heads": 2, "width": 16}
SCENES = {"format": "scenes", "count": 8}
DETR = {"backbone": {"name": "test_resnet", "norm": "group", "stage": 2}, "queries": 4,
        "intermediate": 32, "encoder_layers": 1, "decoder_layers": 2}  # fmt: skip
VISION = {
    "classification": ({"name": "vit_small_patch16_224", "options": VIT}, {"image_size": 16}),
    "detection": (PLAIN | DETR, {"train": SCENES, "test": SCENES, "sizes": [32], "multiple": 8}),
    "grids": (
        PLAIN | {"encoder_layers": 1, "decoder_layers": 1, "feed_forward": 32},
        {"tasks": [{"name": "74dd1130"}], "size": 3},
    ),
    "pixels": (PLAIN | {"layers": 1, "feed_forward": 32, "channel_width": 8}, {"image_size": 4}),
    "widgets": (
        PLAIN | {"layers": 1, "decoder_layers": 1, "intermediate": 16, "dropout": 0.0},
        {"screens": {"kind": "generated", "train": 16, "test": 4}, "vocabulary_size": 300},
    ),
}
POSITION = {
    "widgets": {"name": "fourier", "options": {"dimensions": 4, "extent": 100, "features": 8}}
}
DOWNSTREAM = {
    "snli_ve": ({}, {}),
    "nlvr2": ({}, {}),
    "vqa": ({"decoder": {"layers": 2}}, {}),
    "caption": ({"decoder": {"layers": 2}}, {"max_caption": 10}),
}
every_task = pytest.mark.parametrize("kind", [*VISION, *DOWNSTREAM])


@pytest.fixture(scope="module")
def places(shared, tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    questions = write_shards(folder / "questions", coloured(8))
    return {
        **dict.fromkeys(("classification", "pixels"), folder / "images"),
        "grids": shared / "data_tasks" / "arc_agi1" / "arc_agi1.tar.gz",
        "snli_ve": entailment_shards(folder / "hypotheses", 8),
        "nlvr2": statement_shards(folder / "statements"),
        **dict.fromkeys(("vqa", "caption"), questions),
        "start": tiny_folder(folder / "start"),
    }


def made(kind, places, precision="float32", batch=BATCH, position=None):
    """A task and its data, always with the same start."""
    torch.manual_seed(0)
    if kind in DOWNSTREAM:
        options, data = DOWNSTREAM[kind]
        data = {"train": [str(places[kind])], "canonical_streams": 2, "augment": AUGMENT, **data}
        config = get_task(kind).config.model_validate({"kind": kind, "data": data, **options})
        parts = toy_parts() if "decoder" in options else start_parts(str(places["start"]), {})[0]
        return get_task(kind).build(config, parts, batch, 0, precision)
    model, data = VISION[kind]
    data = {"canonical_streams": 2} | data
    if kind in ("classification", "pixels"):
        data |= {"train": str(places[kind]), "test": str(places[kind])}
    if kind == "grids":
        data["path"] = str(places[kind])
    position = position or POSITION.get(kind, {"name": "learned-2d"})
    values = {"kind": kind, "model": model | {"positions": [position]}, "data": data}
    config = vision_only._task_module(kind)
    name = next(one for one in vars(config) if one.lower() == f"{kind}config")
    return vision_only.build_task(getattr(config, name)(**values), batch, 0, precision)


@every_task
def test_a_share_without_good_samples_has_loss_zero_and_finite_gradients(kind, places):
    task, data = made(kind, places)
    full, empty = task(first_batch(data), 0), task(data.collate([]), 0)
    empty.loss.backward()
    assert empty.loss == 0
    assert empty.losses.keys() == full.losses.keys()  # ranks agree about the names
    for name, parameter in task.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


@every_task
def test_bf16_stays_near_float32(kind, places):
    (full, data), (half, _) = made(kind, places), made(kind, places, "bf16")
    batch = first_batch(data)
    losses = full.eval()(batch, 0).loss, half.eval()(batch, 0).loss
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.05)
    losses[1].backward()
    graded = [p.grad for p in half.parameters() if p.grad is not None]
    assert graded
    assert all(gradient.isfinite().all() for gradient in graded)


@every_task
def test_its_folder_is_the_same_task(kind, places, tmp_path):
    task, data = made(kind, places)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    task.save_model(tmp_path / "model", task.state_dict())
    load = load_task if kind in DOWNSTREAM else vision_only.load_task
    loaded, batch = load(tmp_path / "model"), first_batch(data)
    assert not loaded.training
    assert torch.equal(loaded(batch, 0).loss, task.eval()(batch, 0).loss)


@every_task
def test_one_seed_gives_one_start_and_one_order(kind, places):
    one, other = (made(kind, places) for _ in range(2))
    states = one[0].state_dict(), other[0].state_dict()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    batches = first_batch(one[1]), first_batch(other[1])
    assert torch.equal(one[0].eval()(batches[0], 0).loss, one[0](batches[1], 0).loss)


@every_task
def test_batches_that_streams_do_not_divide_are_refused(kind, places):
    with pytest.raises(ConfigError, match=r"task\.data\.canonical_streams=1"):
        made(kind, places, batch=3)


@pytest.mark.parametrize("kind", VISION)
def test_unknown_encodings_are_refused(kind, places):
    with pytest.raises(ConfigError, match="unknown position encoding 'nonsense'"):
        made(kind, places, position={"name": "nonsense"})


@pytest.mark.parametrize(
    "cross",
    [
        {},
        {"options": {"anchor": {"path_gradient": True}}},
        {"options": {"anchor": {"path_gradient": True}}, "position": ["uniform"]},
    ],
)
@pytest.mark.parametrize("own_tokens", [True, False])
@pytest.mark.parametrize(
    ("kind", "more"),
    [("snli_ve", {"teacher": {}}), ("nlvr2", {}), ("vqa", {}), ("caption", {}),
     ("caption", {"decoder": {"layers": 2, "embedding": "own"}})],
)  # fmt: skip
def test_what_has_no_gradient_is_frozen_and_nothing_else(
    kind, more, own_tokens, cross, places, tmp_path
):
    """DeepSpeed gives parameters without a gradient one of zeros, and AdamW then shrinks them."""
    changes = {"token_projection": own_tokens, "cross": cross}
    parts, _ = start_parts(str(tiny_folder(tmp_path / "start")), changes)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    options, data = DOWNSTREAM[kind]
    options = options | more
    values = {"train": [str(places[kind])], "canonical_streams": 1, "augment": AUGMENT, **data}
    config = get_task(kind).config.model_validate({"kind": kind, "data": values, **options})
    task, batches = get_task(kind).build(config, parts, 8, 0, "float32")
    if options.get("teacher"):
        task.start_teacher(1)
    task(first_batch(batches), 0).loss.backward()
    for name, parameter in task.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert not task.model.match_head.weight.requires_grad
    task.save_model(tmp_path / "model", task.state_dict())
    saved = from_pretrained(tmp_path / "model").model.state_dict()
    assert saved.keys() == before.keys()
    assert torch.equal(saved["match_head.weight"], before["match_head.weight"])


@pytest.mark.parametrize(
    ("position", "threshold", "found"),
    [(["anchor"], None, DELTA), (["anchor"], 0.3, 0.3), ([], None, 0)],
)
def test_a_folder_without_anchors_gives_the_papers_threshold(tmp_path, position, threshold, found):
    folder = tiny_folder(tmp_path / "model", position=[])
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"anchor_threshold": torch.zeros(())}, folder / WEIGHTS)
    changes = {"cross": {"position": position, "options": {"anchor": {"threshold": threshold}}}}
    parts, _ = start_parts(str(folder), changes)
    assert parts.model.anchor_threshold == pytest.approx(found)
