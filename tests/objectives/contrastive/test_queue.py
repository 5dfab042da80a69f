import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp.objectives.queue import KeyQueue


def keys(first, number):
    """Keys that carry their own number."""
    ids = torch.arange(first, first + number)
    return ids[:, None].float().repeat(1, 3), -ids[:, None].float().repeat(1, 3), ids


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 7), st.lists(st.integers(0, 12), max_size=8), st.integers(0, 999))
def test_holds_the_latest_valid_keys(size, pushes, seed):
    queue = KeyQueue(size, 3)
    random = torch.Generator().manual_seed(seed)
    history, first = [], 0
    for number in pushes:
        image, text, ids = keys(first, number)
        valid = torch.rand(number, generator=random) < 0.7
        queue.push(image, text, ids, valid)
        history += ids[valid].tolist()
        first += number
    held = queue.keys()
    assert sorted(held.image_ids.tolist()) == (history[-size:] if size else [])
    assert torch.equal(held.image[:, 0], held.image_ids.float())
    assert torch.equal(held.text[:, 0], -held.image_ids.float())


def test_overwrites_the_oldest_first():
    queue = KeyQueue(4, 3)
    queue.push(*keys(0, 3))
    queue.push(*keys(3, 3))
    assert queue.keys().image_ids.tolist() == [4, 5, 2, 3]
    assert queue.pointer == 2


def test_refuses_the_student():
    image, text, ids = keys(0, 2)
    with pytest.raises(ValueError, match="teacher's keys only"):
        KeyQueue(4, 3).push(image.requires_grad_(), text, ids)
    with pytest.raises(ValueError, match="teacher's keys only"):
        KeyQueue(4, 3).push(image.detach(), text.requires_grad_(), ids)


def test_keys_that_are_not_finite_stay_out():
    queue = KeyQueue(4, 3)
    image, text, ids = keys(0, 4)
    image[1, 2], text[3, 0] = torch.nan, torch.inf
    queue.push(image, text, ids, torch.tensor([False, True, True, True]))
    assert queue.keys().image_ids.tolist() == [2]


def test_keys_are_float32_whatever_is_pushed():
    queue = KeyQueue(4, 3)
    image, text, ids = keys(0, 2)
    queue.push(image.bfloat16(), text.bfloat16(), ids)
    assert queue.keys().image.dtype == torch.float32


def test_checkpoint_round_trip_goes_on_alike():
    queue, other = KeyQueue(5, 3), KeyQueue(5, 3)
    queue.push(*keys(0, 7))
    state = {name: value.clone() for name, value in queue.state_dict().items()}
    queue.push(*keys(7, 2))
    other.load_state_dict(state)
    other.push(*keys(7, 2))
    for name, value in queue.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_refuses_a_queue_of_another_size():
    with pytest.raises(ValueError, match=r"\(4, 3\), this one \(5, 3\)"):
        KeyQueue(5, 3).load_state_dict(KeyQueue(4, 3).state_dict())


def test_refuses_a_negative_size():
    with pytest.raises(ValueError, match="-1"):
        KeyQueue(-1, 3)
