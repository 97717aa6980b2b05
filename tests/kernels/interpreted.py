"""The Triton kernels in Triton's interpreter, on CPU tensors, over a reduced contract; run by the test beside.

A script and not a test: TRITON_INTERPRET has to be set before the kernels are imported. float32 only, as the
interpreter's products of bfloat16 are wrong.
"""

import sys
from dataclasses import replace

import torch

from moetor.kernels.fused_experts import group, table
from moetor.testing import Case, check_backend, contract_cases
from moetor.testing.cases import EVERYTHING


def grid() -> list[Case]:
    """Inference in float32; the largest calls take an interpreter minutes."""
    cases = [replace(case, frozen=EVERYTHING) for case in contract_cases() if case.dtype == torch.float32]
    return [case for case in dict.fromkeys(cases) if case.tokens <= 19 and case.hidden <= 64]


def main() -> None:
    failed = []

    def check(what: str, cases: list[Case]) -> None:
        try:
            report = check_backend("fused", cases)
        except AssertionError as error:
            failed.append(f"{what}: {error}")
        else:
            print(f"{what}: {report.passed} passed, {report.refused.total()} refused", flush=True)
            assert report.passed

    check("tiles", grid())
    table.FEW_TOKENS = 4
    few = [replace(case, tokens=3) for case in grid() if case.tokens == 19 and case.hidden == 64]
    check("matrix-vector", few[::2])
    group.ONE_LAUNCH, group.CHUNK, group.STEP = 16, 16, 8
    check("grouping in four launches", [replace(grid()[0], tokens=50), replace(grid()[0], tokens=33, top_k=5)])
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
