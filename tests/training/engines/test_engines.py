"""ZeRO 0-3 and DDP on CPU ranks: against plain PyTorch, and the pretraining task on each."""

from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("engine_ranks.py")


@pytest.mark.nightly
def test_every_engine_trains_skips_saves_and_loads_as_plain_pytorch(tmp_path):
    """Also: what 1 rank saved loads on 2 ranks in every engine, and the other way round."""
    for world_size, what in ((1, "train"), (2, "train"), (2, "load"), (1, "load")):
        output = ranks.run([SCRIPT, tmp_path, what], world_size)
        for kind in ("0", "1", "2", "3", "3-whole", "ddp"):
            assert f"{kind} holds on {world_size} ranks" in output


@pytest.mark.nightly
def test_engines_and_recomputation_change_no_loss_and_no_weight(tmp_path):
    ranks.run([SCRIPT.with_name("pretraining_ranks.py"), tmp_path], 2)
