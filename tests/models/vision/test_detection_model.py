import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vlp.config import ConfigError
from vlp.positions import CROSS_MODAL, list_positions
from vlp.tasks.detection.model import Detr, DetrConfig, ResNet, ResNetConfig

TINY = {
    "backbone": {"name": "test_resnet", "norm": "group", "stage": 3},
    "width": 16, "heads": 2, "intermediate": 24, "encoder_layers": 2, "decoder_layers": 2,
    "queries": 5,
}  # fmt: skip
CLASSES = 3

# Options without which they need more than names, sizes and roles.
OPTIONS = {"irpe-quantization": {"universe": "global"}}
ON_A_GRID_ALONE = {"learned-1d", "learned-2d"}
ONE_OF_EACH_HOOK = {*ON_A_GRID_ALONE, "rope-axial", "irpe-product", "irpe-quantization", "shaw"}
NAMES = [
    name if name in ONE_OF_EACH_HOOK else pytest.param(name, marks=pytest.mark.nightly)
    for name in list_positions()
    if name not in CROSS_MODAL
]


def detr(*positions, side=64, **options):
    torch.manual_seed(0)
    listed = [item if isinstance(item, dict) else {"name": item} for item in positions]
    return Detr(DetrConfig.model_validate(TINY | {"positions": listed} | options), CLASSES, side)


def with_options(name):
    return {"name": name, "options": OPTIONS.get(name, {})}


def stirred(model):
    """Tables that start at zero would hide mistakes."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def images(*shapes):
    return [torch.randn(3, *shape, generator=torch.Generator().manual_seed(n)).double()
            for n, shape in enumerate(shapes)]  # fmt: skip


def slow_attention(module, query, key, value):
    q, k, v = module.query(query), module.key(key), module.value(value)
    width = q.shape[-1] // module.heads
    rows = torch.zeros_like(q)
    for image in range(len(q)):
        for head in range(module.heads):
            part = slice(head * width, (head + 1) * width)
            for row in range(q.shape[1]):
                logits = k[image, :, part] @ q[image, row, part] / width**0.5
                rows[image, row, part] = logits.softmax(0) @ v[image, :, part]
    return module.output(rows)


def slow_feed_forward(layer, x):
    first, last = layer.feed_forward[0], layer.feed_forward[-1]
    return layer.feed_forward_norm(x + last(first(x).relu()))


def slow_detr(model, pixels, table, at_input=False):
    """Carion et al.'s Fig. 10; `table` (T, width) is added to queries and keys, or to the input."""
    features = model.project(model.backbone(pixels))
    memory = features.flatten(2).mT
    place = 0 if at_input else table
    memory = memory + table if at_input else memory
    for layer in model.encoder:
        placed = memory + place
        attended = slow_attention(layer.attention, placed, placed, memory)
        memory = slow_feed_forward(layer, layer.attention_norm(memory + attended))
    target = memory.new_zeros(len(memory), *model.queries.weight.shape)
    states = []
    for layer in model.decoder:
        placed = target + model.queries.weight
        attended = slow_attention(layer.attention, placed, placed, target)
        target = layer.attention_norm(target + attended)
        placed = target + model.queries.weight
        crossed = slow_attention(layer.cross_attention, placed, memory + place, memory)
        target = slow_feed_forward(layer, layer.cross_norm(target + crossed))
        states.append(F.layer_norm(target, target.shape[-1:], model.decoder_norm.weight,
                                   model.decoder_norm.bias))  # fmt: skip
    out = torch.stack(states)
    x = model.locate[0](out).relu()
    return model.classify(out), model.locate[4](model.locate[2](x).relu()).sigmoid()


@pytest.mark.parametrize("place", ["layers", "input", None])
def test_it_is_the_slow_one(place):
    model = stirred(detr("learned-2d", place=place) if place else detr())
    pixels, table = torch.stack(images((48, 64), (48, 64))), torch.zeros(3, 4, 16).double()
    for encoding in model.positions:
        table = torch.cat([encoding.table_rows[:3, None].expand(-1, 4, -1),
                           encoding.table_columns[None, :4].expand(3, -1, -1)], -1)  # fmt: skip
    logits, boxes = slow_detr(model, pixels, table.flatten(0, 1), place == "input")
    found = model(list(pixels))
    assert found.logits.shape == (2, 2, 5, CLASSES + 1)
    assert torch.allclose(found.logits, logits, rtol=0, atol=1e-9)
    assert torch.allclose(found.boxes, boxes, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [None, "learned-2d", "irpe-product"])
def test_a_image_does_not_depend_on_the_others_in_its_batch(name):
    model = stirred(detr(*([name] if name else [])))
    shapes = [(48, 64), (64, 64), (33, 47), (48, 64), (64, 16), (64, 64)]
    together = model(images(*shapes))
    for number, image in enumerate(images(*shapes)):
        alone = model([image])
        for one, other in zip(together, alone):
            assert torch.allclose(one[:, number], other[:, 0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_trains_or_is_refused_by_name(name):
    model = detr(with_options(name))
    sizes = [(64, 64)] if name in ON_A_GRID_ALONE else [(64, 64), (48, 80)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        found = model([image.float() for image in images(*sizes)])
        logits = found.logits.flatten(0, 2)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
        loss = loss + (found.boxes - 0.3).abs().mean()
        optimiser.zero_grad()
        loss.backward()
        own = [p for n, p in model.named_parameters() if "positions" in n]
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in own)
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_other_grids_work_or_are_refused_by_name(name):
    model = stirred(detr(with_options(name)))
    if name in ON_A_GRID_ALONE:
        with pytest.raises(ValueError, match=rf"{name} .*(4 x 4|16 positions).*(6 x 5|30 tokens)"):
            model(images((96, 80)))
        with pytest.raises(ValueError, match=rf"{name} .*(6 x 5|30 tokens)"):
            model.require_grid(96, 80)
    else:
        model.require_grid(96, 80)
        assert torch.isfinite(model(images((96, 80))).boxes).all()


def test_parameters_of_the_paper():
    def count(*positions):
        config = DetrConfig.model_validate({"positions": list(positions)})
        with torch.device("meta"):
            return sum(p.numel() for p in Detr(config, 91, 1600).parameters())

    # The batch norms of a frozen backbone are buffers; of DETR's 91 class ids some are unused.
    # torchvision and timm have the same ResNet-50, 23,454,912 weights without norms and classifier.
    attention, norm = 4 * (256 * 256 + 256), 2 * 256
    forward = 256 * 2048 + 2048 + 2048 * 256 + 256
    transformer = 6 * (attention + forward + 2 * norm) + 6 * (2 * attention + forward + 3 * norm)
    heads = 256 * 92 + 92 + 2 * (256 * 256 + 256) + 256 * 4 + 4
    rest = 2048 * 256 + 256 + 100 * 256 + norm
    assert count() == 23_454_912 + transformer + heads + rest
    assert round(count() / 1e6, 1) == 41.5
    assert count({"name": "learned-2d"}) - count() == 100 * 128


def test_what_is_frozen_is_not_trained():
    body = ResNet(ResNetConfig(name="resnet18", norm="frozen", frozen_stages=1)).body
    trained = {name.split(".")[0] for name, p in body.named_parameters() if p.requires_grad}
    assert trained == {"layer2", "layer3", "layer4"}
    assert not any("bn" in name for name, _ in body.named_parameters())
    names = [name for name, _ in body.named_buffers()]
    assert any("running_mean" in name for name in names)
    before = {name: b.clone() for name, b in body.named_buffers()}
    body.train()(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(before[name], b) for name, b in body.named_buffers())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": {"name": "resnet999"}}, "backbone resnet999: Unknown model"),
        ({"backbone": {"name": "vit_tiny_patch16_224"}}, "backbone vit_tiny_patch16_224: "),
        ({"backbone": {"name": "resnet18", "norm": "group", "pretrained": True}},
         "public weights need batch norm"),
        ({"heads": 3}, "3 heads do not divide width 16"),
        ({"positions": [{"name": "learned-2d", "options": {"ratio": 2}}]}, "learned-2d"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Detr(DetrConfig.model_validate(TINY | options), CLASSES, 64)


def test_encodings_keep_their_own_start():
    model = detr({"name": "irpe-product", "roles": "qkv"}, "learned-2d")
    for name, parameter in model.named_parameters():
        if "tables" in name:
            assert not parameter.any()
        if name.startswith("positions.0.table"):
            assert parameter.std() < 0.05
