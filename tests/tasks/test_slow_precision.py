"""Precisions that a processor has no instructions for."""

from __future__ import annotations

import pytest
import torch

from vlp.training.engines.environment import advise, is_emulated


def test_only_a_cpu_emulates_and_only_half_precision(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert is_emulated(torch.device("cpu"), "bf16")
    assert not is_emulated(torch.device("cpu"), "float32")
    assert not is_emulated(torch.device("cuda"), "bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not is_emulated(torch.device("cpu"), "bf16")


@pytest.mark.parametrize("supported", [True, False])
def test_the_setting_is_named(supported, monkeypatch, capsys):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    advise("training.precision", "bf16")
    told = "training.precision: this CPU has no instructions for bf16; float32 is several times"
    assert (told in capsys.readouterr().err) is not supported
