"""The pretraining task on DDP, FSDP and ZeRO, with and without recomputation, on two CPU ranks."""

from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("pretraining_ranks.py")


@pytest.mark.integration
@pytest.mark.distributed
def test_engines_and_recomputation_change_no_loss_and_no_weight(tmp_path: Path) -> None:
    ranks.run([SCRIPT, tmp_path], 2)
