"""A function that launches kernels, as an operator of `torch.library`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Differentiate = Callable[..., tuple[Tensor | None, ...]]
_PLAIN = Tensor, nn.Parameter


class KernelOperator:
    """Function that runs as the operator `vlp::name` where something traces, else directly.

    `torch.compile`, fake tensors and dispatch modes see the operator, which breaks no graph.

    Args:
        name: of the operator.
        function: the launch, with types for `torch.library.custom_op`; its first argument is a
            tensor.
        fake: makes empty results for the same arguments.
        setup_context: as of `torch.autograd.Function`, called with (ctx, inputs, output).
        differentiate: its `backward`, differentiable no further; None has no gradient.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        differentiate: Differentiate | None = None,
    ) -> None:
        operator = torch.library.custom_op(f"vlp::{name}", function, mutates_args=())
        operator.register_fake(fake)
        self.direct = function
        if differentiate is not None:
            assert setup_context is not None
            differentiate = once_differentiable(differentiate)
            operator.register_autograd(differentiate, setup_context=setup_context)
            self.direct = _autograd_function(function, setup_context, differentiate)
        self.operator = getattr(torch.ops.vlp, name)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or the operator where something traces."""
        # Direct calls spare the dispatcher's checks, which take the host longer than the launch.
        traced = (
            torch.compiler.is_compiling()
            or is_in_torch_dispatch_mode()
            or type(arguments[0]) not in _PLAIN
            or arguments[0].is_meta
        )
        return self.operator(*arguments) if traced else self.direct(*arguments)


def _autograd_function(
    function: Callable[..., Any], setup_context: Callable[..., None], differentiate: Differentiate
) -> Callable[..., Any]:
    class Function(torch.autograd.Function):
        # Beside a `setup_context`, `apply` reads the signature anew, longer than a launch takes.
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(differentiate)

    return Function.apply
