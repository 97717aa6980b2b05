"""Machines as they are written down here, and the one sentence that each gets."""

from dataclasses import replace

import pytest

from moetor.kernels.external.machine import Machine, Toolkit, find_toolkit
from moetor.kernels.external.requirements import DEEP_GEMM, SONIC_MOE, unmet

VERSIONS = {
    "sgl-deep-gemm": "0.1.5",
    "sonic-moe": "0.1.2.post1",
    "quack-kernels": "0.3.11",
    "nvidia-cutlass-dsl": "4.4.2",
    "apache-tvm-ffi": "0.1.15.post2",
}
SM90 = Machine(
    "cuda", capability=(9, 0), python=(3, 12), toolkit=Toolkit("/usr/local/cuda", (13, 0)), versions=VERSIONS
)
SM100 = replace(SM90, capability=(10, 0))


def without(machine: Machine, *names: str) -> Machine:
    return replace(machine, versions={name: v for name, v in machine.versions.items() if name not in names})


def having(machine: Machine, **versions: str) -> Machine:
    return replace(machine, versions={**machine.versions, **{k.replace("_", "-"): v for k, v in versions.items()}})


def nvcc(machine: Machine, version: tuple[int, int] | None) -> Machine:
    return replace(machine, toolkit=Toolkit("/usr/local/cuda", version))


NVCC_90 = "needs a CUDA toolkit with nvcc 12.3 or newer on compute capability 9.0"
NVCC_100 = "needs a CUDA toolkit with nvcc 12.9 or newer on compute capability 10.0"

# machine: what DeepGEMM (both of its backends), and what SonicMoE says
TABLE = {
    "no CUDA": (Machine("cpu"), "needs an NVIDIA GPU, got cpu", "needs an NVIDIA GPU, got cpu"),
    "MPS": (Machine("mps"), "needs an NVIDIA GPU, got mps", "needs an NVIDIA GPU, got mps"),
    "ROCm": (replace(SM90, hip="6.4"), "needs an NVIDIA GPU, got ROCm 6.4", "needs an NVIDIA GPU, got ROCm 6.4"),
    "SM80": (
        replace(SM90, capability=(8, 0)),
        "needs compute capability 9.0 or 10.0, got 8.0",
        "needs compute capability 9.0 or 10.0, got 8.0",
    ),
    "SM89": (
        replace(SM90, capability=(8, 9)),
        "needs compute capability 9.0 or 10.0, got 8.9",
        "needs compute capability 9.0 or 10.0, got 8.9",
    ),
    "SM120": (
        replace(SM90, capability=(12, 0)),
        "needs compute capability 9.0 or 10.0, got 12.0",
        "needs compute capability 9.0 or 10.0, got 12.0",
    ),
    "SM90": (SM90, None, None),
    "SM90 without a toolkit": (
        replace(SM90, toolkit=None),
        f"{NVCC_90}; CUDA_HOME, CUDA_PATH, nvcc on PATH and /usr/local/cuda name none",
        None,
    ),
    "SM90 without nvcc": (
        nvcc(SM90, None),
        f"{NVCC_90}; /usr/local/cuda has no nvcc, as runtime-only installs have none",
        None,
    ),
    "SM90 with nvcc 12.2": (nvcc(SM90, (12, 2)), f"{NVCC_90}; /usr/local/cuda has 12.2", None),
    "SM90 with nvcc 12.3": (nvcc(SM90, (12, 3)), None, None),
    "SM100 with nvcc 12.8": (nvcc(SM100, (12, 8)), f"{NVCC_100}; /usr/local/cuda has 12.8", None),
    "SM100 with nvcc 12.9": (nvcc(SM100, (12, 9)), None, None),
    "package missing": (
        without(SM90, "sgl-deep-gemm", "sonic-moe"),
        "needs the package sgl-deep-gemm, or the package kernels to fetch kernels-community/deep-gemm;"
        " neither is installed",
        "needs the package sonic-moe, or the package kernels to fetch kernels-community/sonic-moe;"
        " neither is installed",
    ),
    "package missing, kernels installed": (
        having(without(SM90, "sgl-deep-gemm", "sonic-moe"), kernels="0.11.0"),
        None,
        None,
    ),
    "version too old": (
        having(SM90, sgl_deep_gemm="0.1.3", sonic_moe="0.1.1"),
        "needs sgl-deep-gemm 0.1.4 or newer, got 0.1.3",
        "needs sonic-moe 0.1.2 or newer, got 0.1.1",
    ),
    "another distribution, too old": (
        having(without(SM90, "sgl-deep-gemm"), deep_gemm="2.0.0+local"),
        "needs deep-gemm 2.1 or newer, got 2.0.0+local",
        None,
    ),
    "another distribution": (having(without(SM90, "sgl-deep-gemm", "apache-tvm-ffi"), deep_gemm="2.1.1"), None, "x"),
    "nvidia-cutlass-dsl missing": (
        without(SM90, "nvidia-cutlass-dsl"),
        None,
        "needs the package nvidia-cutlass-dsl 4.4.2 or newer beside sonic-moe; it is not installed",
    ),
    "nvidia-cutlass-dsl too old": (
        having(SM90, nvidia_cutlass_dsl="4.3.5"),
        None,
        "needs nvidia-cutlass-dsl 4.4.2 or newer, got 4.3.5",
    ),
    "quack-kernels missing": (
        without(SM90, "quack-kernels"),
        None,
        "needs the package quack-kernels 0.3.11 or newer beside sonic-moe; it is not installed",
    ),
    "apache-tvm-ffi missing": (
        without(SM90, "apache-tvm-ffi"),
        "needs the package apache-tvm-ffi 0.1.11 or newer beside sgl-deep-gemm; it is not installed",
        "needs the package apache-tvm-ffi 0.1.11 or newer beside sonic-moe; it is not installed",
    ),
    "sonic-moe on Python 3.11": (replace(SM90, python=(3, 11)), None, "needs Python 3.12 or newer, got 3.11"),
}
TABLE["another distribution"] = (*TABLE["another distribution"][:2], TABLE["apache-tvm-ffi missing"][2])


@pytest.mark.parametrize("name", TABLE)
def test_each_machine_gets_its_sentence(name: str) -> None:
    machine, deep_gemm, sonic_moe = TABLE[name]
    assert unmet(DEEP_GEMM, machine) == deep_gemm
    assert unmet(SONIC_MOE, machine) == sonic_moe


def make_toolkit(home, release: str | None) -> None:
    (home / "bin").mkdir(parents=True)
    if release:
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
        nvcc.chmod(0o755)


def test_toolkit_is_the_one_that_run_time_compilers_take(tmp_path, monkeypatch) -> None:
    for name, release in (("home", "12.4"), ("path", "12.9"), ("found", "13.0"), ("runtime", None)):
        make_toolkit(tmp_path / name, release)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "found" / "bin"), prepend=":")
    assert find_toolkit() == Toolkit(str(tmp_path / "found"), (13, 0))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    assert find_toolkit() == Toolkit(str(tmp_path / "path"), (12, 9))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_toolkit() == Toolkit(str(tmp_path / "home"), (12, 4))
    # the one that is named is the one that will be used, whatever else there is
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "runtime"))
    assert find_toolkit() == Toolkit(str(tmp_path / "runtime"), None)
