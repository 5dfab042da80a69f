"""What a training's configuration refuses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vlp.training.config import LoopConfig


def test_a_static_graph_takes_no_accumulation():
    assert LoopConfig(static_graph=True).static_graph
    assert LoopConfig(gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    with pytest.raises(ValidationError, match="static_graph needs gradient_accumulation_steps=1"):
        LoopConfig(static_graph=True, gradient_accumulation_steps=2)
