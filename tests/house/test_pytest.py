"""Tests run as `pytest FILE`, too, which does not put the working folder on the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
def test_packages_are_not_taken_for_the_folders_of_their_tests():
    tests = "tests/evaluation/ablations/test_seed_tests.py"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", tests]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
