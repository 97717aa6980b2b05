"""Libraries are loaded once, installed ones first, and nothing is downloaded for the asking."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from moetor import BackendUnavailable
from moetor.kernels.external import packages
from moetor.kernels.external.machine import Machine
from moetor.kernels.external.requirements import DEEP_GEMM

INSTALLED = Machine("cuda", capability=(9, 0), versions={"sgl-deep-gemm": "0.1.5", "kernels": "0.11.0"})
HUB_ONLY = Machine("cuda", capability=(9, 0), versions={"kernels": "0.11.0"})


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_loaded", "_described", "_failed"):
        monkeypatch.setattr(packages, name, {})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def get_kernel(name: str) -> ModuleType:
        asked.append(name)
        return ModuleType("from_hub")

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    return asked


def test_installed_package_comes_first_and_says_where_from(hub, monkeypatch, caplog) -> None:
    module = ModuleType("deep_gemm")
    module.__file__ = "/somewhere/deep_gemm/__init__.py"
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    with caplog.at_level(logging.INFO, "moetor"):
        packages.fetch(DEEP_GEMM, INSTALLED)
        assert packages.not_loaded(DEEP_GEMM, INSTALLED) is None
    assert packages.loaded(DEEP_GEMM) is module
    assert hub == []
    assert caplog.messages == ["loaded sgl-deep-gemm 0.1.5 from /somewhere/deep_gemm/__init__.py"]


def test_hub_is_asked_when_somebody_chooses_and_not_before(hub, caplog) -> None:
    reason = packages.not_loaded(DEEP_GEMM, HUB_ONLY)
    assert reason == (
        "has not loaded kernels-community/deep-gemm yet; ExpertsInterface.load(name) does, or choosing the backend"
        " for a model"
    )
    assert hub == []
    with caplog.at_level(logging.INFO, "moetor"):
        packages.fetch(DEEP_GEMM, HUB_ONLY)
        packages.fetch(DEEP_GEMM, HUB_ONLY)
    assert hub == ["kernels-community/deep-gemm"]
    assert packages.not_loaded(DEEP_GEMM, HUB_ONLY) is None
    assert caplog.messages[0] == "loading kernels-community/deep-gemm from the hub, by kernels 0.11.0"


def test_failed_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(packages.importlib, "import_module", broken)
    wanted = "cannot import deep_gemm: OSError: libcuda.so.1: cannot open shared object file"
    assert packages.not_loaded(DEEP_GEMM, INSTALLED) == wanted
    with pytest.raises(BackendUnavailable, match="deep_gemm is not loaded"):
        packages.loaded(DEEP_GEMM)


def test_failed_download_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> ModuleType:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=offline))
    with pytest.raises(BackendUnavailable, match="cannot load kernels-community/deep-gemm: ConnectionError"):
        packages.fetch(DEEP_GEMM, HUB_ONLY)
    assert issubclass(BackendUnavailable, ImportError)
