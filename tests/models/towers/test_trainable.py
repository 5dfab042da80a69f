import pytest
import torch
from pretraining_batch import batch
from pydantic import ValidationError
from tests_support import POOLED_TOWER, TINY_MODEL, tiny_config

from vlp.config import ConfigError, merge
from vlp.models.towers import batch_norms, require_whole_batches
from vlp.models.vlp import VLPModel
from vlp.objectives.config import ObjectivesConfig
from vlp.tasks.pretraining import Pretraining
from vlp.training.config import PretrainConfig

DEEPER = {"layers": 3}
SMALL = {"name": "vit_small_patch14_reg4_dinov2", "embed_dim": 24, "depth": 3, "num_heads": 2}
DROPPING = {"architecture": SMALL | {"drop_path_rate": 0.9}, "patch_size": 14, "image_size": 28}


def model(text=(), image=()):
    torch.manual_seed(0)
    return VLPModel(tiny_config(text=DEEPER | dict(text), image=DEEPER | dict(image)))


def trained(encoder):
    return {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("image", [{}, DROPPING], ids=["own", "timm"])
def test_number_of_last_blocks_that_are_trained(image):
    for count, blocks in ((0, set()), (1, {"2"}), (3, {"0", "1", "2"})):
        encoder = model(image=image | {"trainable": count}).image_encoder
        names = {name for name in trained(encoder) if name.startswith("vit.")}
        assert {name.split(".")[2] for name in names if "blocks" in name} == blocks
        rest = {name for name in names if "blocks" not in name}
        assert rest == ({"vit.norm.weight", "vit.norm.bias"} if count else set())
        assert {"projection.weight", "projection.bias"} <= trained(encoder)
        text = model(text={"trainable": count}).text_encoder
        names = trained(text) - {"projection.weight", "projection.bias"}
        assert {name.split(".")[1] for name in names} == blocks
        assert all(name.startswith("layers.") for name in names)
    whole = model(image=image).image_encoder
    assert trained(whole) == {name for name, _ in whole.named_parameters()}


def test_statistics_of_frozen_batch_norms_stay():
    tower = {"name": "xcit_nano_12_p16_224", "depth": 2, "embed_dim": 32, "num_heads": 2}
    xcit = {"architecture": tower, "patch_size": 16, "image_size": 32}
    for trainable, moving in ((0, 0), (1, 1), ("all", 6)):
        built = model(image=xcit | {"trainable": trainable}).train()
        norms = batch_norms(built)
        before = [norm.running_mean.clone() for norm in norms]
        built.encode_image(torch.rand(4, 3, 32, 32))
        moved = [not torch.equal(norm.running_mean, old) for norm, old in zip(norms, before)]
        assert sum(moved) == moving
        for ranks, key in ((2, None), (1, "training.grad_cache")):
            if moving:
                with pytest.raises(ConfigError, match="statistics"):
                    require_whole_batches(built, ranks, key)
            else:
                require_whole_batches(built, ranks, key)
        require_whole_batches(built, 1, None)


def test_norms_of_token_encodings_are_embeddings():
    positions = {"fourier": {"norm": True}}
    encoder = model(image={"positions": positions, "trainable": 1}).image_encoder
    norms = {n for n, _ in encoder.named_parameters() if "positions." in n and "norm" in n}
    assert len(norms) == 4
    assert not norms & trained(encoder)
    assert {encoder.layer_distances()[name] for name in norms} == {encoder.depth + 1}


def test_frozen_tower_keeps_no_graph_and_stays_in_evaluation_mode():
    frozen = model({"trainable": 0}, DROPPING | {"trainable": 0}).train()
    pixels = torch.randn(4, 3, 28, 28)
    assert not frozen.image_encoder.vit.training
    assert frozen.image_encoder.projection.training
    states = frozen.image_encoder.tower(pixels)
    assert torch.equal(states, frozen.image_encoder.tower(pixels))  # no path is dropped
    assert not states.requires_grad
    assert frozen.image_encoder(pixels).requires_grad  # by the adapter
    ids, mask = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)
    assert not frozen.text_encoder(ids, mask).requires_grad
    partly = model(image=DROPPING | {"trainable": 1}).train()
    assert partly.image_encoder.vit.training
    torch.manual_seed(0)
    first, second = (partly.image_encoder.tower(pixels) for _ in range(2))
    assert not torch.equal(first, second)
    partly.image_encoder(pixels).sum().backward()
    graded = {n for n, p in partly.image_encoder.named_parameters() if p.grad is not None}
    assert not graded - trained(partly.image_encoder)
    assert any("blocks.2" in name for name in graded)


@pytest.mark.parametrize("side", ["text", "image"])
def test_more_blocks_than_there_are_is_refused(side):
    with pytest.raises(ConfigError, match=rf"{side}\.trainable is 4, and the tower has 3 blocks"):
        model(**{side: {"trainable": 4}})


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"pool": 2, "image_size": 32, "patch_size": 8}, r"image\.pool 2 mixes"),
        ({"trainable": 0}, r"image\.trainable 0 freezes"),
        (DROPPING, r"objectives\.mim: the patches of .* cannot be replaced"),
    ],
)
def test_mim_refuses_what_it_cannot_mask(image, message):
    sizes = merge(TINY_MODEL, {"image": image})
    data = {"sources": [{"path": "x"}], "vocabulary": "x", "canonical_streams": 1}
    with pytest.raises(ValidationError, match=message):
        PretrainConfig.model_validate({"model": sizes, "data": data})
    settings = {"model": sizes, "data": data, "objectives": {"mim": None}}
    PretrainConfig.model_validate(settings)


def test_frozen_tower_runs_once_for_student_and_teacher():
    config = tiny_config(image=POOLED_TOWER | {"trainable": 0})
    objectives = {"mim": None, "itm": {"group": 4}, "teacher": {"queue": 8}}
    losses = []
    for stored in (False, True):
        torch.manual_seed(0)
        task = Pretraining(config, ObjectivesConfig.model_validate(objectives), "-")
        passes = []
        for model in (task.model, task.teacher.average.module["model"]):
            embed = model.image_encoder.vit.patch_embed
            embed.register_forward_hook(lambda _, pixels, __, to=passes: to.append(len(pixels[0])))
        pixels = torch.randn(4, 3, 56, 56, generator=torch.Generator().manual_seed(5))
        pixels = task.model.image_encoder.tower(pixels) if stored else pixels
        losses.append(task(batch(4)._replace(pixels=pixels), 0).loss)
        assert passes == [4]
    assert torch.equal(*losses)
