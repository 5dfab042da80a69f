from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import unit
from torch import nn

from vlp.config import ConfigError
from vlp.distributed import gather
from vlp.objectives.config import ContrastiveConfig, ObjectivesConfig
from vlp.objectives.contrastive import (
    candidate_cross_entropy,
    itc_loss,
    positives,
    sigmoid_loss,
    soft_targets,
)
from vlp.objectives.loss import normalise, require_whole_groups, sample_groups
from vlp.objectives.queue import KeyQueue, Keys
from vlp.tasks.pretraining.objectives import Contrastive
from vlp.tasks.teacher import Teacher


@pytest.fixture
def case():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=random)
    positive = torch.rand(5, 7, generator=random) < 0.4
    positive[0], positive[1, :3] = False, True  # a row without, a row with several positives
    positive[2] = torch.arange(7) == 3
    candidate_valid = torch.tensor([True, False, True, True, True, False, True])
    return logits, positive, candidate_valid


def test_invalid_candidates_and_lonely_rows_have_finite_zero_gradients(case):
    logits, positive, candidate_valid = case
    logits = logits.clone().requires_grad_()
    candidate_cross_entropy(logits, positive, candidate_valid).sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, ~candidate_valid] == 0).all()
    assert (logits.grad[0] == 0).all()
    assert (logits.grad[1] != 0).any()


@pytest.fixture
def pairs():
    image, text = unit(4, 6, seed=1), unit(4, 6, seed=2)
    image_keys = torch.cat([image, unit(5, 6, seed=3)])
    text_keys = torch.cat([text, unit(5, 6, seed=4)])
    ids = torch.tensor([7, 8, 7, 0])[:, None].expand(-1, 2)
    key_ids = torch.cat([ids, torch.tensor([8, 11, 12, 7, 0])[:, None].expand(-1, 2)])
    valid = torch.tensor([True, True, True, False])
    key_valid = torch.cat([valid, torch.tensor([True, True, False, True, True])])
    return image, text, image_keys, text_keys, ids, key_ids, valid, key_valid


def test_ids_of_images_stand_for_those_of_captions():
    by_image = positives(torch.tensor([3, 5]), torch.tensor([5, 3, 3]))
    assert by_image.int().tolist() == [[0, 1, 1], [1, 0, 0]]
    queue = KeyQueue(4, 3)
    queue.push(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([9]), torch.ones(1) > 0)
    assert queue.pair_ids[0].tolist() == [9, 9]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=9, max_size=9))
def test_linked_keys_of_batch_and_queue_are_no_negatives(ids):
    image, text = unit(9, 6, seed=1), unit(9, 6, seed=2)
    pair_ids, key_valid = torch.tensor(ids), torch.tensor([True] * 3 + [False] + [True] * 5)
    objectives = ObjectivesConfig(contrastive=ContrastiveConfig(kind="itc"), teacher=None)
    step = SimpleNamespace(
        batch=SimpleNamespace(pair_ids=pair_ids[:4], valid=key_valid[:4]),
        image=SimpleNamespace(feature=image[:4]),
        text=SimpleNamespace(feature=text[:4]),
        model=SimpleNamespace(temperature=lambda: 0.5),
        teacher=SimpleNamespace(keys=Keys(image, text, pair_ids, key_valid), alpha=0.0),
    )
    contrastive = Contrastive(objectives.contrastive, objectives, None)
    total = 0.0
    for row, (image_id, caption_id) in enumerate(ids[:3]):
        same = [image_id == i or caption_id == c for i, c in ids]
        linked = [(image_id, c) in ids or (i, caption_id) in ids for i, c in ids]
        used = [k for k in range(9) if k != 3 and (same[k] or not linked[k])]
        for query, candidates in ((image[row], text), (text[row], image)):
            logs = (candidates[used] @ query / 0.5).log_softmax(0)
            total -= logs[[same[k] for k in used]].mean() / 2
    torch.testing.assert_close(contrastive(step)["contrastive"].loss.total, total)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_soft_targets_mix_with_the_hard_ones(pairs, alpha):
    image, text, image_keys, text_keys, ids, key_ids, valid, key_valid = pairs
    positive = positives(ids, key_ids)
    soft = soft_targets(image, text, image_keys, text_keys, 0.2, key_valid)
    for target in soft:
        torch.testing.assert_close(target.sum(-1), torch.ones(4, dtype=torch.float64))
        assert (target[:, ~key_valid] == 0).all()
    total, rows = 0.0, [0, 1, 2]  # row 3 is an empty slot
    for query, keys, target in ((image, text_keys, soft[0]), (text, image_keys, soft[1])):
        logits = (query @ keys.T / 0.07).masked_fill(~key_valid, -torch.inf)
        for i in rows:
            hard = (positive[i] & key_valid).double()
            mixed = (1 - alpha) * hard / hard.sum() + alpha * target[i]
            total = total - 0.5 * (mixed * logits[i].log_softmax(-1))[key_valid].sum()
    options = {"candidate_valid": key_valid, "soft_targets": soft, "alpha": alpha}
    loss = itc_loss(*pairs[:4], positive, 0.07, valid, **options)
    torch.testing.assert_close(loss.total, total)
    assert loss.count == 3


ROWS = 12


def inputs():
    random = torch.Generator().manual_seed(0)
    image, text = (torch.randn(ROWS, 5, generator=random).double() for _ in range(2))
    ids = torch.stack([torch.arange(ROWS) % 7, torch.arange(ROWS) % 5 + 10], 1)  # on several ranks
    valid = torch.ones(ROWS, dtype=torch.bool)
    valid[[1, 10]] = False
    return image, text, ids, valid


def parameters():
    return [torch.tensor(value, dtype=torch.float64) for value in (0.3, -1.5)]


def sigmoid_reference():
    image, text, ids, valid = inputs()
    leaves = [leaf.requires_grad_() for leaf in (image, text, *parameters())]
    image, text, temperature, bias = leaves
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    total, pairs = torch.zeros((), dtype=torch.float64), ids.tolist()
    for i, (image_id, caption_id) in enumerate(pairs):
        for j, (other_image, other_caption) in enumerate(pairs):
            same = image_id == other_image or caption_id == other_caption
            linked = [image_id, other_caption] in pairs or [other_image, caption_id] in pairs
            if valid[i] and valid[j] and (same or not linked):
                logit = image[i] @ text[j] / temperature + bias
                total = total - F.logsigmoid(logit if same else -logit)
    loss = total / valid.sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def run_rank(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    share = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    image, text, ids, valid = (value[share] for value in inputs())
    leaves = [leaf.requires_grad_() for leaf in (image, text, *parameters())]
    image, text, temperature, bias = leaves
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    loss = normalise({"": sigmoid_loss(image, text, ids, valid, temperature, bias)})[""]
    gradients = torch.autograd.grad(loss, leaves)
    if ranks > 1:
        gathered = [gather(gradient) for gradient in gradients[:2]]
        whole = torch.stack([loss.detach(), *gradients[2:]])
        dist.all_reduce(whole)
        gradients = [*gathered, *whole[1:]]
        loss = whole[0]
    # Engines average gradients over ranks.
    torch.save([value / ranks for value in (loss.detach(), *gradients)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loss_and_gradients_are_those_of_all_pairs(ranks, tmp_path):
    torch.multiprocessing.start_processes(
        run_rank, (ranks, str(tmp_path)), nprocs=ranks, start_method="fork"
    )
    loss, gradients = sigmoid_reference()
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, [loss, *gradients])


def keys(first, number):
    ids = torch.arange(first, first + number)[:, None].expand(-1, 2)
    image = ids[:, :1].float().repeat(1, 3)
    return image, -image, ids, torch.ones(number) > 0


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 7), st.lists(st.integers(0, 12), max_size=8), st.integers(0, 999))
def test_holds_the_latest_valid_keys(size, pushes, seed):
    queue = KeyQueue(size, 3)
    random = torch.Generator().manual_seed(seed)
    history, first = [], 0
    for number in pushes:
        image, text, ids, valid = keys(first, number)
        valid &= torch.rand(number, generator=random) < 0.7
        queue.push(image, text, ids, valid)
        history += ids[valid, 0].tolist()
        first += number
    held = queue.keys()
    own = held.pair_ids[:, 0]
    assert sorted(own.tolist()) == (history[-size:] if size else [])
    assert torch.equal(held.image[:, 0], own.float())
    assert torch.equal(held.text[:, 0], -own.float())


def test_refuses_the_student():
    image, text, *rows = keys(0, 2)
    with pytest.raises(ValueError, match="teacher's keys only"):
        KeyQueue(4, 3).push(image.requires_grad_(), text, *rows)
    with pytest.raises(ValueError, match="teacher's keys only"):
        KeyQueue(4, 3).push(image.detach(), text.requires_grad_(), *rows)


def test_keys_that_are_not_finite_stay_out():
    queue = KeyQueue(4, 3)
    image, text, ids, _ = keys(0, 4)
    image[1, 2], text[3, 0] = torch.nan, torch.inf
    queue.push(image, text, ids, torch.tensor([False, True, True, True]))
    assert queue.keys().pair_ids[:, 0].tolist() == [2]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (KeyQueue(5, 3).load_state_dict, [KeyQueue(4, 3).state_dict()], r"\(4, 3\), .*\(5, 3"),
        (KeyQueue, [-1, 3], "-1"),
        (sample_groups, [20, 16], "20 rows cannot be cut into groups of 16"),
    ],
)
def test_impossible_sizes_are_named(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)


def test_checkpoint_round_trip_goes_on_alike():
    queue, other = KeyQueue(5, 3), KeyQueue(5, 3)
    queue.push(*keys(0, 7))
    state = {name: value.clone() for name, value in queue.state_dict().items()}
    queue.push(*keys(7, 2))
    other.load_state_dict(state)
    other.push(*keys(7, 2))
    for name, value in queue.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("rows", "group", "expected"),
    [(32, 16, (2, 16)), (16, 16, (1, 16)), (5, 16, (1, 5)), (3, 1, (3, 1)), (0, 4, (0, 4))],
)
def test_sizes(rows, group, expected):
    assert sample_groups(rows, group) == expected


@pytest.mark.parametrize(("batch", "ranks"), [(128, 4), (96, 1), (48, 2)])
def test_what_would_depend_on_the_ranks_is_refused(batch, ranks):
    for whole in ((128, 1), (128, 2), (48, 1), (64, 1)):
        require_whole_groups(ObjectivesConfig(itm={"group": 64}), *whole)
    message = f"task.objectives.itm.group 64 does not divide .* {batch // ranks} samples"
    with pytest.raises(ConfigError, match=message):
        require_whole_groups(ObjectivesConfig(itm={"group": 64}), batch, ranks, "task.objectives")


def test_something_must_be_trained():
    with pytest.raises(ValueError, match="nothing is trained"):
        ObjectivesConfig(contrastive=None, itm=None, mlm=None, mim=None)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("threshold", torch.tensor(0.5))
        self.register_buffer("seen", torch.tensor(0))


def test_copies_buffers_it_is_given():
    student = Student()
    teacher = Teacher(student)
    student.threshold.fill_(0.25)
    student.seen.fill_(9)
    teacher.update(dict(student.named_parameters()), 0.9)
    assert teacher.module.threshold == 0.5
    teacher.update(dict(student.named_parameters()), 0.9, dict(student.named_buffers()))
    assert teacher.module.threshold == 0.25
    assert teacher.module.seen == 9


def test_names_of_other_heads_are_allowed_missing_ones_are_not():
    student = Student()
    teacher = Teacher(student)
    weights = dict(student.named_parameters()) | {"itm.weight": torch.zeros(2)}
    teacher.update(weights, 0.9)
    del weights["layer.bias"]
    with pytest.raises(KeyError, match=r"layer\.bias"):
        teacher.update(weights, 0.9)


def test_moves_only_where_the_step_was_applied():
    student = Student()
    teacher = Teacher(student)
    with torch.no_grad():
        student.layer.weight.add_(1.0)
    before = teacher.module.layer.weight.clone()
    for applied, step in ((torch.tensor(False), 0.0), (torch.tensor(True), 0.1), (None, 0.19)):
        teacher.update(dict(student.named_parameters()), 0.9, applied=applied)
        torch.testing.assert_close(teacher.module.layer.weight, before + step)


def test_weights_of_products_are_kept_rounded_beside_float32():
    student = Student()
    plain, rounded = Teacher(student), Teacher(student, torch.bfloat16)
    rounded.to("cpu")
    for step in range(20):
        with torch.no_grad():
            student.layer.weight.add_(0.001)
        for teacher in (plain, rounded):
            weights, buffers = dict(student.named_parameters()), dict(student.named_buffers())
            teacher.update(weights, 0.995, buffers, torch.tensor(step != 3))
    expected, found = plain.state_dict(), rounded.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for name, weight in rounded.module.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, found[name].bfloat16())
        assert not torch.equal(weight.float(), found[name])


@pytest.mark.parametrize("first", [False, True])
def test_rounded_weights_are_restored_with_float32_ones(first):
    student = Student()
    teacher, again = Teacher(student, torch.bfloat16), Teacher(Student(), torch.bfloat16)
    teacher.to("cpu")
    state = {name: value.clone() for name, value in teacher.state_dict().items()}
    if first:
        again.load_state_dict(state)
    again.to("cpu")
    if not first:
        again.load_state_dict(state)
    found = again.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert torch.equal(again.module.layer.weight, teacher.module.layer.weight)
    assert again.module.layer.weight.dtype == torch.bfloat16
