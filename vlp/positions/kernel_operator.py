"""Kernel launches as operators of `torch.library`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Backward = Callable[..., tuple[Tensor | None, ...]]
_PLAIN = Tensor, nn.Parameter


class KernelOperator:
    """Function that runs as the operator `vlp::name` under tracing, otherwise directly.

    `torch.compile`, fake tensors and dispatch modes see one opaque operator.

    Args:
        function: launches the kernel; its first argument is a tensor.
        fake: allocates results of the same shapes and dtypes for the same arguments.
        setup_context: as in `torch.autograd.Function`, called with (ctx, inputs, output).
        backward: as in `torch.autograd.Function`, without second derivatives; None: the operator
            has no gradient.
        schema: of `torch.library.custom_op`; None: from the type annotations of `function`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        backward: Backward | None = None,
        schema: str | None = None,
    ) -> None:
        operator = torch.library.custom_op(f"vlp::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        self.direct = function
        if backward is not None:
            assert setup_context is not None
            single_backward = once_differentiable(backward)
            operator.register_autograd(single_backward, setup_context=setup_context)
            self.direct = _autograd_function(function, setup_context, single_backward)
        self.operator = getattr(torch.ops.vlp, name)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or the operator under tracing."""
        # The dispatcher's checks take the host longer than the launch of a kernel.
        is_traced = (
            torch.compiler.is_compiling()
            or is_in_torch_dispatch_mode()
            or type(arguments[0]) not in _PLAIN
            or arguments[0].is_meta
        )
        return self.operator(*arguments) if is_traced else self.direct(*arguments)


def _autograd_function(
    function: Callable[..., Any], setup_context: Callable[..., None], backward_function: Backward
) -> Callable[..., Any]:
    class Function(torch.autograd.Function):
        # No method `setup_context`: with it `apply` inspects the signature in every call.
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(backward_function)

    return Function.apply
