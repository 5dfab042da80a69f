"""What a model is shown in place of an image."""

import torch

from vlp.data.image.ablated_views import viewed


def patches(image, side):
    """Every patch as a tuple of its values."""
    cut = image.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
    return {tuple(patch) for patch in cut.reshape(-1, image.shape[0] * side * side).tolist()}


def test_shuffled_images_are_patches_of_the_moved_image():
    pixels = torch.rand(3, 3, 8, 12)
    mixed = viewed(pixels, "shuffled", 4, 1)
    for image, found in zip(pixels, mixed):
        moves = [torch.roll(image, (y, x), (1, 2)) for y in range(4) for x in range(4)]
        assert sum(patches(found, 4) == patches(move, 4) for move in moves) == 1
    assert not torch.equal(mixed, pixels)
    assert torch.equal(viewed(pixels, "shuffled", 4, 1), mixed)
    assert torch.equal(viewed(pixels, "image", 4, 1), pixels)


def test_shuffled_images_do_not_tell_where_a_thing_lay_by_where_the_grid_cut_it():
    """A line in one column of an image, found in every column of a patch equally often."""
    pixels = torch.zeros(400, 1, 8, 8)
    pixels[..., 5] = 1
    mixed = viewed(pixels, "shuffled", 4, 0)
    columns = mixed.sum((0, 1, 2)).unflatten(0, (2, 4)).sum(0)
    assert columns.sum() == 400 * 8
    assert ((columns - 800).abs() < 160).all()


def test_a_blank_image_says_nothing():
    assert not viewed(torch.rand(2, 3, 8, 8), "blank", 4, 0).any()
