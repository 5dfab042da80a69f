"""Where the tokens of padded images lie: for encodings that need a grid, and in any batch alike."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from vlp.layers.backbones.attention import Places
from vlp.positions import attach

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
GRIDS = [(3, 6), (4, 2), (4, 4)]


def siglip():
    config = Siglip2VisionConfig(**SIZES, num_attention_heads=2, num_patches=16, patch_size=4)
    return Siglip2VisionModel(config).eval()


def padded(images):
    return nn.utils.rnn.pad_sequence(images, batch_first=True)


def run(model, images, grids):
    """(B, features) of images that are patches of grids."""
    pixels, mask = padded(images), padded([torch.ones(len(one)) for one in images]).bool()
    return model(pixels, mask.long(), torch.tensor(grids)).pooler_output


def test_padded_images_of_as_many_tokens_are_no_grid():
    model = attach(siglip(), "irpe-product")
    patches = torch.randn(1, 16, 48)
    every, some = torch.ones(1, 16).long(), (torch.arange(16) < 12).long()[None]
    model(patches, every, torch.tensor([[4, 4]]))
    with pytest.raises(ValueError, match="irpe-product needs a grid, but these tokens have coord"):
        model(patches, some, torch.tensor([[3, 4]]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cope", {}),
        ("fourier", {}),
        ("md-sine", {}),
        ("mlp", {}),
        ("rope-1d", {}),
        ("rope-axial", {}),
        ("rope-axial", {"rescale": True}),
        ("rope-mixed", {}),
        ("sine-1d", {"extent": 10.0}),
        ("sine-2d", {}),
        ("sine-2d", {"extent": 10.0}),
    ],
)
def test_an_image_is_what_it_is_alone_in_every_batch(name, options):
    torch.manual_seed(0)
    model = attach(siglip(), name, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    images = [torch.randn(rows * columns, 48) for rows, columns in GRIDS]
    together = run(model, images, GRIDS)
    for one, image, grid in zip(together, images, GRIDS, strict=True):
        torch.testing.assert_close(run(model, [image], [grid])[0], one, atol=1e-4, rtol=1e-4)


def test_threads_send_images_of_different_grids():
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "num_classes": 4}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=16, dynamic_img_size=True, **sizes)
    model = attach(vit.eval(), "alibi-2d")
    wide, high = torch.randn(1, 3, 8, 32), torch.randn(1, 3, 32, 8)
    with torch.no_grad():
        expected = model(wide)
    with ThreadPoolExecutor(1) as other, torch.no_grad():

        def ask_beside(*_):
            hook.remove()
            other.submit(model, high).result()

        hook = vit.blocks[0].register_forward_pre_hook(ask_beside)
        assert torch.equal(model(wide), expected)


def test_a_thread_that_wrote_nothing_reads_what_was_written_last():
    places = Places(0)
    places.write(2, 8)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(places.read, 16).result().grid == (2, 8)
        other.submit(places.write, 4, 4).result()
        assert places.read(16).grid == (2, 8)
        assert other.submit(places.read, 16).result().grid == (4, 4)
    for again in (copy.deepcopy(places), pickle.loads(pickle.dumps(places))):
        assert again.read(16).grid == (4, 4)
