"""What ACE-RPE alone can know of an image: how far patches lie apart, not in which direction."""

import pytest
import torch
from tests_support import ace, tiny_config

from vlp.models.vlp import VLPModel

SIDE, PATCH = 4, 4
GRID = torch.arange(SIDE * SIDE).unflatten(0, (SIDE, SIDE))
TURNS = {
    "mirrored": lambda grid: grid.flip(1),
    "upside down": lambda grid: grid.flip(0),
    "turned": lambda grid: grid.rot90(),
    "transposed": lambda grid: grid.T,
}


def score(position, order, **anchor):
    """Logits of a text with images, one as it is and one with its patches in another order."""
    torch.manual_seed(0)
    size = {"image_size": SIDE * PATCH, "patch_size": PATCH, "position": "none"}
    cross = {"layout": "ace", "position": position, **ace(**anchor)}
    model = VLPModel(tiny_config(image=size, cross=cross)).double().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.anchor_threshold.fill_(0.3)
    patches = torch.randn(SIDE * SIDE, 3, PATCH, PATCH).double()
    images = torch.stack([drawn(patches), drawn(patches[order.flatten()])])
    ids, mask = torch.randint(5, 40, (1, 7)).expand(2, -1), torch.ones(2, 7, dtype=torch.bool)
    words = mask.clone()
    words[:, [0, -1]] = False
    with torch.no_grad():
        return model.match(model.encode_image(images), model.encode_text(ids, mask, words))


def drawn(patches):
    rows = patches.unflatten(0, (SIDE, SIDE)).permute(2, 0, 3, 1, 4)
    return rows.reshape(3, SIDE * PATCH, SIDE * PATCH)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    ("mode", "metric"), [("contextual", "euclidean"), ("bias", "manhattan"), ("bias", "chebyshev")]
)
def test_a_image_and_its_mirror_image_are_one_to_ace_rpe(turn, mode, metric):
    straight, turned = score(["anchor"], TURNS[turn](GRID), mode=mode, metric=metric)
    assert straight.item() == pytest.approx(turned.item(), abs=1e-10)


def test_other_orders_of_its_patches_are_not():
    straight, shuffled = score(["anchor"], torch.randperm(SIDE * SIDE), mode="contextual")
    assert abs(straight - shuffled) > 1e-4
