import pytest
import torch
from torch import nn

from vlp.tasks.teacher import Teacher, soft_target_share


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("threshold", torch.tensor(0.5))
        self.register_buffer("seen", torch.tensor(0))


def test_follows_the_closed_form():
    student = Student()
    teacher = Teacher(student)
    start = student.layer.weight.detach().clone()
    with torch.no_grad():
        student.layer.weight.add_(1.0)
    for _ in range(5):
        teacher.update(dict(student.named_parameters()), 0.9)
    torch.testing.assert_close(teacher.module.layer.weight, start + (1 - 0.9**5))


def test_equal_weights_stay_exactly_equal():
    student = Student()
    teacher = Teacher(student)
    for _ in range(10):
        teacher.update(dict(student.named_parameters()), 0.995)
    assert torch.equal(teacher.module.layer.weight, student.layer.weight)


def test_moves_under_a_bfloat16_student():
    """At momentum 0.995 a bfloat16 average of these numbers would stand still."""
    student = Student().bfloat16()
    teacher = Teacher(student)
    with torch.no_grad():
        student.layer.weight.fill_(1.0)
        teacher.module.layer.weight.fill_(0.9)
    teacher.update(dict(student.named_parameters()), 0.995)
    assert teacher.module.layer.weight.dtype == torch.float32
    torch.testing.assert_close(teacher.module.layer.weight, torch.full((2, 3), 0.9005))


def test_holder_does_not_register_it():
    holder = nn.Module()
    holder.student = Student()
    holder.teacher = Teacher(holder.student)
    assert all(name.startswith("student.") for name in holder.state_dict())
    assert len(list(holder.parameters())) == 2
    assert not any(p.requires_grad for p in holder.teacher.module.parameters())
    assert not holder.teacher.module.training


def test_is_a_copy():
    student = Student()
    teacher = Teacher(student)
    with torch.no_grad():
        student.layer.weight.zero_()
    assert teacher.module.layer.weight.norm() > 0
    assert student.layer.weight.requires_grad


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
    with pytest.raises(KeyError, match=r"no layer\.bias \(1 of 2"):
        teacher.update(weights, 0.9)


def test_refuses_a_shard():
    student = Student()
    weights = dict(student.named_parameters()) | {"layer.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match="full-size"):
        Teacher(student).update(weights, 0.9)


def test_checkpoint_round_trip():
    teacher, other = Teacher(Student()), Teacher(Student())
    other.load_state_dict(teacher.state_dict())
    for name, value in teacher.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    with pytest.raises(RuntimeError, match=r"layer\.bias"):
        other.load_state_dict({k: v for k, v in teacher.state_dict().items() if k != "layer.bias"})


def test_soft_target_share_rises_linearly():
    assert [soft_target_share(step, 0.4, 4) for step in (0, 1, 2, 4, 9)] == [0, 0.1, 0.2, 0.4, 0.4]
    assert soft_target_share(0, 0.4, 0) == 0.4


def test_moves_only_where_the_step_was_applied():
    student = Student()
    one, other = Teacher(student), Teacher(student)
    with torch.no_grad():
        student.layer.weight.add_(1.0)
    before = one.module.layer.weight.clone()
    one.update(dict(student.named_parameters()), 0.9, applied=torch.tensor(False))
    assert torch.equal(one.module.layer.weight, before)
    one.update(dict(student.named_parameters()), 0.9, applied=torch.tensor(True))
    other.update(dict(student.named_parameters()), 0.9)
    torch.testing.assert_close(one.module.layer.weight, other.module.layer.weight)


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
