"""Fixtures every test may use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("vlp", deadline=None)
settings.load_profile("vlp")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be what tests start;
# some of them press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of small real data sets; missing is an error in CI and a skip elsewhere."""
    folder = Path(os.environ.get("VLP_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        message = f"no shared data at {folder}; set VLP_SHARED to the folder that holds data/"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
