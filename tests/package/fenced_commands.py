"""The commands in the fenced blocks of a page, and their results on small data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from product import ROOT

# Calls of these are written down instead of run; anything else in a block fails.
SHELL = """
for name in vlp make pip python git cd; do
  eval "$name() { printf '%s\\\\0' $name \\"\\$@\\" $'\\x01'; }"
done
"""


def commands(page: str, section: str = "") -> list[list[str]]:
    """The commands of a page, or of a section alone, in order, parsed by a shell."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if section:
        _, heading, rest = text.partition(f"\n## {section}\n")
        assert heading, f"{page} has no section {section!r}"
        text = rest.partition("\n## ")[0]
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language not in ("", "bash", "sh", "console"):
            continue
        shell = ["/bin/bash", "--noprofile", "--norc", "-eu", "-c", SHELL + block]
        ran = subprocess.run(shell, env={"PATH": "/nowhere"}, capture_output=True, check=False)
        assert ran.returncode == 0, f"{page}: {ran.stderr.decode()} in\n{block}"
        calls = ran.stdout.decode().split("\x01\0")[:-1]
        found += [call.rstrip("\0").split("\0") for call in calls]
    return found


def run_all(pages: dict[str, list[list[str]]], folder: Path, timeout: int) -> list[dict[str, Any]]:
    """What became of every command, in a process without a checkout in its folder.

    Args:
        pages: commands by page; each page has a folder of its own with small data.
        folder: an empty one.
        timeout: seconds.
    """
    paths = [ROOT, ROOT / "tests" / "support"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(Path(__file__).with_name("run_commands.py")), str(folder)]
    ran = subprocess.run(
        program, input=json.dumps(pages), env=environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]
