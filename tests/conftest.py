import pytest
import torch


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Made models are kept for the whole session."""
    return tmp_path_factory.mktemp("farl-cache")


@pytest.fixture(autouse=True)
def _one_thread():
    """Runs set the number of threads; tests must not depend on the one before."""
    torch.set_num_threads(1)
