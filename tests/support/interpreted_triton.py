"""Triton's kernels run by its interpreter, on a CPU."""

import dataclasses
import importlib.util
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from vlp.positions import anchor, anchor_attention, anchor_kernels


@contextmanager
def interpreted():
    """Run second copies of the kernels: Triton reads TRITON_INTERPRET where one is decorated.

    Where there is a GPU the kernels stay as they are.
    """
    if torch.cuda.is_available():
        yield
        return
    language, core = triton.language, triton.language.core
    owners = language, core, language.math, core.tensor, core.dtype, core.tensor_descriptor_base
    before = [(owner, dict(vars(owner))) for owner in owners]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Sums of indices are checked for overflow otherwise, in a third of the time.
        builder = interpreter.interpreter_builder
        unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", unchecked)
        patch.setattr(interpreter, "_convert_float", _rounded(interpreter._convert_float))
        spec = importlib.util.spec_from_file_location(
            "kernels_interpreted", anchor_kernels.__file__
        )
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        # Triton's own functions, such as `tl.sum`, were decorated when it was imported.
        for name, function in vars(language).copy().items():
            if isinstance(function, triton.JITFunction):
                setattr(language, name, triton.jit(function.fn))
        # The interpreter has no products of bfloat16; those of float32 add up the same.
        language.dot = lambda a, b, **options: core.dot(
            a.to(core.float32), b.to(core.float32), **options
        )
        for module in (anchor, anchor_attention):
            patch.setattr(module, "kernels", lambda: copy)
        yield
    for owner, attributes in before:  # which the interpreter leaves as it needs them
        for name, value in attributes.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)
        for name in set(vars(owner)) - set(attributes):
            delattr(owner, name)


def _rounded(convert):
    """Round float32 to the nearest bfloat16, as a GPU does; the interpreter cuts it off."""

    def rounded(x, kind, into, rounding_mode):
        if (kind, into) == (triton.language.float32, triton.language.bfloat16):
            bits = np.ascontiguousarray(x).view(np.uint32)
            up = 0x7FFF + ((bits >> 16) & 1)
            found = np.where(np.isnan(x), bits | 0x400000, bits + up) >> 16
            return found.astype(np.uint16)
        return convert(x, kind, into, rounding_mode)

    return rounded
