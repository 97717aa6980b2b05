"""Every backend, over the whole contract: results and gradients against a float64 loop."""

import pytest

from moetor import ExpertsInterface
from moetor.testing import Case, check_case, contract_cases, runnable

BUILT_IN = ("auto", "eager", "batched_mm", "grouped_mm", "fused")
# Kernels of others, by stand-ins and on a GPU: test_deepgemm, test_sonicmoe, test_external_on_gpu.
EXTERNAL = ("deepgemm", "deepgemm_megamoe", "sonicmoe")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", contract_cases(), ids=str)
@pytest.mark.parametrize("backend", BUILT_IN)
def test_result_and_gradients_are_right_twice(backend: str, case: Case, device: str) -> None:
    inputs, reason = runnable(backend, case, device)
    if inputs is None:
        pytest.skip(reason or "")
    problems, _ = check_case(backend, inputs)
    assert not problems, "; ".join(problems)


def test_the_list_above_is_complete() -> None:
    assert (*BUILT_IN, *EXTERNAL) == ExpertsInterface.names()
