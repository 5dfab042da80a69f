"""Precisions that a processor has no instructions for."""

from __future__ import annotations

import torch

from vlp.training.engines.environment import is_emulated


def test_only_a_cpu_emulates_and_only_half_precision(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert is_emulated(torch.device("cpu"), "bf16")
    assert not is_emulated(torch.device("cpu"), "float32")
    assert not is_emulated(torch.device("cuda"), "bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not is_emulated(torch.device("cpu"), "bf16")
