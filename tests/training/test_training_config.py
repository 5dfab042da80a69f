"""Settings that their engine would not read, or that leave nothing, are refused."""

from __future__ import annotations

import pytest

from vlp.training.config import LoopConfig, PretrainTrainingConfig


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gradient_reduction": "bf16"}, "engine deepspeed takes no gradient_reduction"),
        ({"static_graph": True}, "static_graph is of engine ddp, not of deepspeed"),
        ({"engine": "fsdp", "static_graph": True}, "static_graph is of engine ddp, not of fsdp"),
        (
            {"checkpoint_every": 300, "keep_every": 1000},
            "keep_every 1000 is no multiple of checkpoint_every 300",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PretrainTrainingConfig.model_validate(values)


def test_their_own_engine_takes_them() -> None:
    ddp = LoopConfig.model_validate({"gradient_reduction": "bf16", "static_graph": True})
    assert ddp.gradient_reduction == "bf16"
    assert ddp.static_graph
    fsdp = PretrainTrainingConfig.model_validate({"engine": "fsdp", "gradient_reduction": "bf16"})
    assert fsdp.gradient_reduction == "bf16"
    kept = LoopConfig.model_validate({"checkpoint_every": 250, "keep_every": 1000})
    assert kept.keep_every == 1000
