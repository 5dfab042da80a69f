import pytest
import torch

from vlp.layers.blocks import INIT_STD, TextEmbedding


@pytest.mark.parametrize("sines", [3.0, 0.5])
def test_positions_start_as_strong_as_asked_and_tell_distances(sines):
    torch.manual_seed(0)
    embedding = TextEmbedding(500, 64, 40, sines)
    table = embedding.position.weight
    strength = table.square().mean().sqrt() / embedding.word.weight.square().mean().sqrt()
    assert strength.item() == pytest.approx(sines, rel=0.05)
    products = table @ table.T
    for distance in range(1, 4):  # what two places have in common depends on how far they are apart
        of_pairs = products.diagonal(distance)
        torch.testing.assert_close(of_pairs, of_pairs[:1].expand_as(of_pairs))
    neighbours = products[5:-5].gather(1, torch.arange(5, 35)[:, None] + torch.arange(-4, 5))
    assert (neighbours.argmax(-1) == 4).all()


def test_words_start_as_berts_and_positions_do_without_sines():
    torch.manual_seed(0)
    embedding = TextEmbedding(2000, 64, 500, 0.0)
    for table in (embedding.word.weight, embedding.position.weight):
        assert table.std().item() == pytest.approx(INIT_STD, rel=0.02)


def test_refuses_long_texts_and_odd_widths():
    with pytest.raises(ValueError, match="9 tokens exceeds the 8 positions"):
        TextEmbedding(50, 16, 8)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="15 channels"):
        TextEmbedding(50, 15, 8, 3.0)
