"""Precisions that a processor has no instructions for."""

from __future__ import annotations

import pytest
import torch

from vlp.tasks.plain import is_emulated
from vlp.training import command


def test_only_a_cpu_emulates_and_only_half_precision(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert is_emulated(torch.device("cpu"), "bf16")
    assert not is_emulated(torch.device("cpu"), "float32")
    assert not is_emulated(torch.device("cuda"), "bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not is_emulated(torch.device("cpu"), "bf16")


@pytest.mark.parametrize("supported", [True, False])
def test_a_training_says_so(supported, monkeypatch, capsys):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    command._advise("bf16")
    assert ("float32 is several times as fast here" in capsys.readouterr().err) is not supported
