import pytest
import torch

from vlp.objectives.mim import MIMHead, mim_loss, patchify


def test_patches_in_raster_order_channel_row_column():
    pixels = torch.randn(2, 3, 4, 6)
    patches = patchify(pixels, 2)
    assert patches.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            square = pixels[1, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[1, 3 * row + column], square.flatten())


def test_patch_layout_is_that_of_a_patch_convolution():
    pixels, convolution = torch.randn(1, 3, 8, 8), torch.nn.Conv2d(3, 5, 4, stride=4)
    by_patch = patchify(pixels, 4) @ convolution.weight.flatten(1).T + convolution.bias
    torch.testing.assert_close(by_patch, convolution(pixels).flatten(2).transpose(1, 2))


def test_refuses_images_of_broken_patches():
    with pytest.raises(ValueError, match="5 x 4 pixels are not whole patches of 2"):
        patchify(torch.zeros(1, 3, 5, 4), 2)


def test_equals_the_loop():
    pixels, prediction = torch.randn(3, 3, 4, 8).double(), torch.randn(3, 8, 12).double()
    mask = torch.rand(3, 2, 4) < 0.5
    mask[0, 0, 0] = True
    valid = torch.tensor([True, True, False])
    total, count = 0.0, 0
    for b in range(2):
        for row in range(2):
            for column in range(4):
                if mask[b, row, column]:
                    square = pixels[b, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    error = (prediction[b, 4 * row + column] - square.flatten()).abs()
                    total += error.sum().item() / 12
                    count += 1
    loss = mim_loss(prediction, pixels, mask, valid)
    assert loss.total.item() == pytest.approx(total)
    assert loss.count == count


def test_only_masked_patches_of_real_rows_get_a_gradient():
    prediction = torch.randn(2, 4, 12, requires_grad=True)
    mask = torch.tensor([[[True, False], [False, True]]] * 2)
    loss = mim_loss(prediction, torch.randn(2, 3, 4, 4), mask, torch.tensor([True, False]))
    loss.total.backward()
    touched = prediction.grad.abs().sum(-1) > 0
    assert touched.tolist() == [[True, False, False, True], [False] * 4]


def test_nothing_masked_is_zero():
    prediction = torch.randn(2, 4, 12, requires_grad=True)
    loss = mim_loss(prediction, torch.randn(2, 3, 4, 4), torch.zeros(2, 2, 2) > 0)
    loss.total.backward()
    assert loss.total == 0
    assert loss.count == 0


def test_refuses_a_prediction_of_another_size():
    with pytest.raises(ValueError, match="do not fit images"):
        mim_loss(torch.zeros(1, 4, 27), torch.zeros(1, 3, 4, 4), torch.zeros(1, 2, 2) > 0)


def test_loss_is_float32_for_half_precision():
    loss = mim_loss(
        torch.randn(1, 4, 12).bfloat16(), torch.randn(1, 3, 4, 4), torch.ones(1, 2, 2) > 0
    )
    assert loss.total.dtype == torch.float32


def test_head_is_one_linear_layer_and_a_mask_token():
    head = MIMHead(5, 2)
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == {
        "mask_token.token": (5,),
        "pixels.weight": (12, 5),
        "pixels.bias": (12,),
    }
    patches, mask = torch.randn(2, 4, 5), torch.rand(2, 2, 2) < 0.5
    mask[0, 0, 0], mask[1, 1, 1] = True, False
    replaced = head.mask_token(patches, mask)
    assert torch.equal(replaced[~mask.flatten(1)], patches[~mask.flatten(1)])
    assert (replaced[mask.flatten(1)] == head.mask_token.token).all()
    assert head(replaced).shape == (2, 4, 12)
