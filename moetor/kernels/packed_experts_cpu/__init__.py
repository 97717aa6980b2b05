"""Rows times the quantised matrices of their experts on a CPU, reading the packed bytes: compiled C++.

A dequantised matrix costs a hundred times the product of one row with it; here bytes become numbers in registers.
Where there is no C++ compiler, callers dequantise.
"""

from .build import compiler
from .rows import available, packed_rows, takes

__all__ = ["available", "compiler", "packed_rows", "takes"]
