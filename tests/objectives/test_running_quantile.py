import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlp.objectives.running_quantile import BINS, _histogram, similarity_quantile


@given(
    seed=st.integers(0, 99), quantile=st.floats(0.05, 0.95), spread=st.sampled_from([0.01, 0.2, 1])
)
def test_equals_the_sorted_entries_to_one_bin(seed: int, quantile: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    similarity = (torch.randn(3, 6, 5, 2, generator=generator) * spread).clamp(-1, 1)
    word_mask = torch.rand(3, 5, generator=generator) < 0.6
    word_mask[0, 0] = True
    valid = torch.tensor([True, False, True])
    entries = [
        similarity[row, :, token].flatten()
        for row in (0, 2)
        for token in range(5)
        if word_mask[row, token]
    ]
    ordered = torch.cat(entries).sort().values
    expected = ordered[int(torch.ceil(torch.tensor(quantile * len(ordered)))) - 1]
    found = similarity_quantile(similarity, word_mask, valid, quantile)
    assert found.dtype == torch.float32
    assert abs(float(found) - float(expected)) <= 2.01 / BINS


@pytest.mark.parametrize("nothing", ["words", "slots"])
def test_without_entries_it_is_nan(nothing: str) -> None:
    similarity = torch.zeros(2, 4, 3, 1)
    words = torch.full((2, 3), nothing != "words")
    valid = torch.full((2,), nothing != "slots")
    assert similarity_quantile(similarity, words, valid, 0.9).isnan()


def test_ends_of_the_range_stay_inside() -> None:
    similarity = torch.tensor([-1.0, 1.0]).view(1, 2, 1, 1)
    words, valid = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    assert float(similarity_quantile(similarity, words, valid, 0.25)) == pytest.approx(
        -1 + 2 / BINS
    )
    assert float(similarity_quantile(similarity, words, valid, 0.75)) == pytest.approx(1)


def test_the_form_for_a_gpu_counts_the_same():
    similarity = torch.rand(3, 7, 5, 2) * 2 - 1
    similarity[0, 0, 0] = torch.tensor([-1.0, 1.0])
    words = torch.rand(3, 5) < 0.6
    words[0, 0] = True
    compact, on_device = (_histogram(similarity, words, form) for form in (False, True))
    assert compact.dtype == on_device.dtype
    assert torch.equal(compact, on_device)
    assert compact.sum() == words.sum() * 14
