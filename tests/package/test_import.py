"""`import vlp` is light: quick, quiet and alone."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import socket, subprocess, sys, time
def refuse(*arguments, **options):
    raise AssertionError("import vlp must not reach out")
import torch
subprocess.Popen.__init__ = refuse
socket.socket.connect = refuse
start = time.perf_counter()
import vlp
print(time.perf_counter() - start)
print(sorted(m for m in ("timm", "transformers", "deepspeed") if m in sys.modules))
"""


def test_import_is_quick_and_reaches_nothing():
    seconds, heavy = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert float(seconds) < 1.0
    assert heavy == "[]"


def test_public_names_are_there():
    import vlp

    assert callable(vlp.load)
    assert "anchor" in vlp.list_positions()
    assert not hasattr(vlp, "nothing")
