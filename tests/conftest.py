"""Fixtures every test may use."""

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

# Without a network, a name that is missing would be asked of the hub for 20 seconds. Set before
# huggingface_hub is imported, which other conftest.py do.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    """Hide GPUs from tests and from what they start; `pytest -m gpu` alone sees them."""
    if config.option.markexpr != "gpu":
        # The second variable lets PyTorch count devices by the first one, without the driver.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@pytest.fixture(autouse=True)
def _has_its_device(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def shared():
    """The folder of small real data sets; missing is an error in CI and a skip elsewhere."""
    folder = Path(os.environ.get("VLP_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        message = f"no shared data at {folder}; set VLP_SHARED to the folder that holds data/"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
