import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tensors here are tiny; a second thread only waits for the first."""
    torch.set_num_threads(1)
