"""ZeRO 0-3 on CPU ranks against plain PyTorch; what is asserted is in engine_ranks.py."""

from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).with_name("engine_ranks.py")


@pytest.mark.distributed
def test_every_stage_trains_skips_saves_and_loads_as_plain_pytorch(tmp_path: Path) -> None:
    """Also: what 1 rank saved loads on 2 ranks at every stage, and the other way round."""
    for world_size, what in ((1, "train"), (2, "train"), (2, "load"), (1, "load")):
        output = ranks.run([SCRIPT, tmp_path, what], world_size)
        for kind in ("0", "1", "2", "3", "3-whole"):
            assert f"ZeRO {kind} holds on {world_size} ranks" in output
