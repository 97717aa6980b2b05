"""Whole-number arithmetic on the way to a launch; Triton's functions of these names cost 2 µs a call."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n of at least 1."""
    return 1 << (n - 1).bit_length()
