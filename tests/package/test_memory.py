"""Freed memory stays with the process once it was told so."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from vlp.training.engines.environment import keep_freed_memory

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident()
block = torch.ones(100 * 2**20 // 4)
del block
print(resident() - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's options")
@pytest.mark.parametrize(("how", "least", "most"), [("keep", 90, 130), ("not", -10, 40)])
def test_freed_memory_stays_only_where_asked(how: str, least: float, most: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True
    )
    assert least < float(done.stdout) < most
