"""The precision of an evaluation: what is asked for, else bf16 and TF32 on a GPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from evaluation.work_sharding import inference

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def state(device: torch.device) -> tuple[torch.dtype | None, str]:
    on = torch.is_autocast_enabled(device.type)
    kind = torch.get_autocast_dtype(device.type) if on else None
    return kind, torch.get_float32_matmul_precision()


@pytest.mark.parametrize("precision", [None, "float32"])
def test_a_cpu_computes_in_float32(precision):
    with inference(CPU, precision):
        assert state(CPU) == (None, "highest")


@pytest.mark.parametrize(
    ("able", "kind", "products"), [(True, torch.bfloat16, "high"), (False, None, "highest")]
)
def test_a_gpu_with_bf16_computes_in_it_and_float32_products_in_tf32(able, kind, products):
    with (
        patch("torch.cuda.is_bf16_supported", return_value=able),
        patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        inference(GPU, None),
    ):
        assert state(GPU) == (kind, products)
    assert state(GPU) == (None, "highest")


def test_tf32_ends_with_the_last_of_several_threads():
    with (
        patch("torch.cuda.is_bf16_supported", return_value=True),
        patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
    ):
        first, second = inference(GPU, None), inference(GPU, None)
        for context in (first, second):
            context.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "high"
        second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("precision", "kind"), [("float32", None), ("bf16", torch.bfloat16)])
def test_a_gpu_computes_in_what_is_asked_for(precision, kind):
    with (
        patch("torch.cuda.is_bf16_supported", return_value=True),
        patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        inference(GPU, precision),
    ):
        assert state(GPU) == (kind, "highest")
