"""What every test runs under: no network, no timings, a fixed seed, few threads, and no GPU tests without a GPU."""

import os

# before anything imports transformers: a test that needs the network is a broken test
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# what `moetor tune` measured on this machine is no part of a test
os.environ["MOETOR_CACHE"] = os.devnull

import pytest
import torch

# small tensors gain nothing from more, and two pytest processes on two cores would starve each other
torch.set_num_threads(min(torch.get_num_threads(), 2))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every test, whichever tests ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
