"""What a model is shown in place of a picture."""

import torch

from vlp.data.views import viewed


def test_shuffled_pictures_keep_their_patches():
    pixels = torch.rand(2, 3, 8, 8)
    mixed = viewed(pixels, "shuffled", 4, 1)

    def patches(image):
        cut = image.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).reshape(4, -1)
        return {tuple(patch) for patch in cut.tolist()}

    assert not torch.equal(mixed, pixels)
    assert [patches(image) for image in mixed] == [patches(image) for image in pixels]
    assert torch.equal(viewed(pixels, "shuffled", 4, 1), mixed)
    assert torch.equal(viewed(pixels, "picture", 4, 1), pixels)


def test_a_blank_picture_says_nothing():
    assert not viewed(torch.rand(2, 3, 8, 8), "blank", 4, 0).any()
