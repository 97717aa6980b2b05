"""What several of these tests share."""

from collections.abc import Iterator

import pytest
import torch

import moetor
from moetor.integrations.transformers import decode

from .phases import Ran, watched


@pytest.fixture
def zeros() -> Iterator[str]:
    """A stranger's backend whose use cannot be overlooked: all experts give zero."""
    moetor.ExpertsInterface.register("zeros", lambda weights, hidden_states, index, w: torch.zeros_like(hidden_states))
    yield "zeros"
    moetor.ExpertsInterface.unregister("zeros")


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode phase switches backends on this machine, as it does on a GPU."""
    monkeypatch.setattr(decode, "switches_on", lambda device: True)


@pytest.fixture
def ran() -> Iterator[Ran]:
    """What backends have run."""
    with watched() as ran:
        yield ran
