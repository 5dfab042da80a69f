import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests_support import TINY_MODEL

from evaluation.grounding.grounding import grad_cam, layer_number
from vlp.models.config import ModelConfig
from vlp.models.vlp import VLPModel

GRID, TOKENS, HEADS = (4, 4), 6, 2


def tiny(layout="ace", layers=2):
    cross = TINY_MODEL["cross"] | {"layout": layout, "layers": layers}
    model = VLPModel(ModelConfig.model_validate(TINY_MODEL | {"cross": cross})).double().eval()
    for name, parameter in model.named_parameters():
        if "cross_encoder" in name or "match_head" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    model.anchor_threshold.fill_(0.2)
    return model


def encoded(model, rows=2):
    ids = torch.randint(5, 40, (rows, TOKENS))
    attention = torch.arange(TOKENS) < torch.tensor([TOKENS, 4, 5])[:rows, None]
    words = attention & (torch.arange(TOKENS) > 0) & attention.roll(-1, 1)
    pixels = torch.randn(rows, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        return model.encode_image(pixels), model.encode_text(ids, attention, words)


def odds(model, image, text):
    """Like `match`, but in float64."""
    logits = model.itm_logits(model.cross(image, text, need_image=False))
    return logits[:, 1] - logits[:, 0]


def by_differences(model, image, text, layer):
    """(B, N, M): one probability after the other is moved up and down, each in a row of its own."""
    attention = model.cross_encoder.layers[layer].cross_attention
    entries, step = HEADS * TOKENS * 17, 1e-5
    moves = torch.eye(entries, dtype=torch.float64).view(-1, HEADS, TOKENS, 17) * step
    moves = torch.cat([moves, -moves])
    kept = []

    def move(_, __, probabilities):
        if probabilities.shape != moves.shape:
            return None  # the image stream's
        kept.append(probabilities[0])
        return probabilities + moves

    hook = attention.probabilities.register_forward_hook(move)
    gradients = []
    for row in range(len(text.states)):
        same = [row] * len(moves)
        with torch.no_grad():
            up, down = odds(model, image.select(same), text.select(same)).chunk(2)
        gradients.append(((up - down) / (2 * step)).view(HEADS, TOKENS, 17))
    hook.remove()
    weighted = (torch.stack(gradients).clamp(min=0) * torch.stack(kept)).mean(1)[..., 1:]
    return weighted * text.attention_mask[..., None]


@pytest.mark.parametrize("layout", ["ace", "text", "albef"])
@pytest.mark.parametrize("layer", [0, 1])
def test_equals_finite_differences(layout, layer):
    model = tiny(layout)
    image, text = encoded(model)
    maps = grad_cam(model, image, text, layer)
    assert maps.shape == (2, TOKENS, *GRID)
    assert maps.dtype == torch.float64
    expected = by_differences(model, image, text, layer).unflatten(-1, GRID)
    assert expected.max() > 1e-4
    torch.testing.assert_close(maps, expected, atol=1e-7, rtol=1e-5)


def test_threads_get_their_own_maps_and_scores():
    model = tiny()
    batches = [encoded(model, rows) for rows in (1, 2, 3)]
    expected = [(grad_cam(model, *batch), model.match(*batch)) for batch in batches]
    attention = model.cross_encoder.layers[0].cross_attention
    with ThreadPoolExecutor(6) as pool:
        jobs = [*itertools.product(range(3), (grad_cam, VLPModel.match))] * 10
        found = list(pool.map(lambda job: job[1](model, *batches[job[0]]), jobs))
    for (number, ask), one in zip(jobs, found):
        torch.testing.assert_close(one, expected[number][ask is VLPModel.match])
    assert attention.fused is None
    assert not attention.probabilities._forward_hooks


def test_layers_are_counted_as_in_a_list():
    model = tiny(layers=3)
    image, text = encoded(model)
    maps = [grad_cam(model, image, text, layer) for layer in range(3)]
    assert not torch.equal(maps[0], maps[1])
    torch.testing.assert_close(grad_cam(model, image, text, -3), maps[0])
    torch.testing.assert_close(grad_cam(model, image, text), maps[1])
    assert [layer_number(tiny(layers=count)) for count in (1, 2, 3, 6)] == [0, 0, 1, 2]


def test_impossible_inputs_are_refused():
    model = tiny()
    image, text = encoded(model, rows=3)
    with pytest.raises(ValueError, match="2 images and 3 texts"):
        grad_cam(model, image.select([0, 1]), text, 0)
    with pytest.raises(ValueError, match="12 patches do not fill the model's grid of 4 x 4"):
        grad_cam(model, image._replace(states=image.states[:, :13]), text, 0)
    model.cross_encoder.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="no cross-modal layer"):
        grad_cam(model, image, text)


def state_of(model):
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
    ]
    fused = [layer.cross_attention.fused for layer in model.cross_encoder.layers]
    modes = [module.training for module in model.modules()]
    wanted = [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    return hooks, fused, modes, wanted


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails):
    model = tiny()
    image, text = encoded(model)
    before = odds(model, image, text)
    model.train()
    model.text_encoder.eval()
    model.cross_encoder.layers[0].cross_attention.fused = True
    next(model.parameters()).requires_grad_(False)
    state = state_of(model)
    if fails:
        with pytest.raises(RuntimeError):
            grad_cam(model, image._replace(states=image.states[..., :3]), text, 0)
    else:
        grad_cam(model, image, text, 0)
    assert state_of(model) == state
    model.cross_encoder.layers[0].cross_attention.fused = None
    assert torch.equal(odds(model.eval(), image, text), before)


@pytest.mark.parametrize("fused", [True, False, None])
def test_frozen_fused_and_without_gradients_the_maps_are_the_same(fused):
    model = tiny()
    image, text = encoded(model)
    expected = grad_cam(model, image, text, 0)
    model.requires_grad_(False)
    for layer in model.cross_encoder.layers:
        layer.cross_attention.fused = fused
    with torch.no_grad():
        maps = grad_cam(model, image, text, 0)
    torch.testing.assert_close(maps, expected)
    assert not maps.requires_grad


def test_under_autocast_the_maps_are_float32_and_alike():
    model = tiny()
    image, text = encoded(model)
    expected = grad_cam(model, image, text, 0).float()
    model.float()
    image = type(image)(*(field.float() for field in image))
    text = text._replace(states=text.states.float(), tokens=text.tokens.float())
    with torch.autocast("cpu", torch.bfloat16):
        maps = grad_cam(model, image, text, 0)
    assert maps.dtype == torch.float32
    assert (maps - expected).norm() < 0.1 * expected.norm()
