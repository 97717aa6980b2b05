"""The contract of a backend, as a test suite for strangers and for ourselves.

>>> import moetor, moetor.testing
>>> report = moetor.testing.check_backend("eager", moetor.testing.contract_cases()[:2])
>>> report.passed
2
"""

from .cases import Case, Inputs, contract_cases, make_inputs, prime_memory
from .contract import Report, check_backend, check_case, runnable
from .oracle import oracle, relative_error

__all__ = [
    "Case",
    "Inputs",
    "Report",
    "check_backend",
    "check_case",
    "contract_cases",
    "make_inputs",
    "oracle",
    "prime_memory",
    "relative_error",
    "runnable",
]
