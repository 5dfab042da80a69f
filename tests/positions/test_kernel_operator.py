import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vlp.positions.kernel_operator import KernelOperator

calls = []


def triple(x: Tensor, factor: int) -> Tensor:
    calls.append(torch.is_grad_enabled())
    return (3 * factor * x.detach()).clone()


def keep(ctx, inputs, output):
    ctx.factor = inputs[1]


def differentiate(ctx, above):
    return triple_backward(above, ctx.factor), None


def empty(x, factor):
    return torch.empty_like(x)


triple_backward = KernelOperator("test_triple_backward", triple, empty)
operator = KernelOperator("test_triple", triple, empty, keep, differentiate)


class Seen(FlopCounterMode):
    def __init__(self):
        super().__init__(display=False)
        self.names = []

    def _count_flops(self, func_packet, out, args, kwargs):
        self.names.append(str(func_packet))
        return super()._count_flops(func_packet, out, args, kwargs)


def result(call):
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = call(x, 2)
    y.sum().backward()
    return y.detach(), x.grad


def test_a_direct_call_gives_what_the_operator_gives():
    calls.clear()
    found = result(operator)
    assert len(calls) == 2
    torch.testing.assert_close(found, result(operator.operator), rtol=0, atol=0)
    assert found[1].tolist() == [6, 6]


def test_a_dispatch_mode_sees_the_operator():
    with Seen() as seen:
        result(operator)
    assert "vlp.test_triple" in seen.names
    assert "vlp.test_triple_backward" in seen.names


def test_it_compiles_without_a_break():
    torch._dynamo.reset()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(result(compiled), result(operator), rtol=0, atol=0)


def test_tensors_without_data_launch_nothing():
    with FakeTensorMode():
        fake = torch.empty(2, 3)
    calls.clear()
    for x in (fake, torch.empty(2, 3, device="meta")):  # outside of the mode that made it
        assert operator(x, 1).shape == (2, 3)
    assert not calls


def test_a_second_derivative_is_refused():
    x = torch.ones(2, requires_grad=True)
    for call in (operator, operator.operator):
        (first,) = torch.autograd.grad((call(x, 1) * x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()
