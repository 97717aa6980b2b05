"""Formats are data: names tell all of it, and what makes no sense cannot be built."""

import pytest
import torch

from moetor import Format, InvalidInput
from moetor.core.formats import FORMATS, fp8, mxfp4


def test_a_name_means_one_format() -> None:
    made = [
        make(block, scale, activations)
        for make in (fp8, lambda _, scale, activations: mxfp4(scale, activations))
        for block in ((128, 128), (64, 128), (0, 0), (1, 0), (1, 32))
        for scale in ("float32", "e8m0")
        for activations in (None, "dynamic", "static")
    ]
    assert all(FORMATS[format.name] is format for format in made)
    assert len({format.name for format in made}) == len(set(made))


def test_asking_twice_gives_the_same_object() -> None:
    assert fp8((96, 64)) is fp8((96, 64))


@pytest.mark.parametrize(
    ("format", "rows", "columns", "shape"),
    [
        (fp8(), 576, 7168, (5, 56)),  # DeepSeek-V3's kv_a projection: the last block has 64 rows
        (fp8(), 128, 128, (1, 1)),
        (fp8(), 129, 127, (2, 1)),
        (fp8((0, 0)), 576, 7168, (1, 1)),
        (fp8((1, 0)), 7, 300, (7, 1)),
        (fp8((32, 16)), 33, 17, (2, 2)),
        (mxfp4(), 64, 2880, (64, 90)),
    ],
)
def test_shape_of_scales(format: Format, rows: int, columns: int, shape: tuple[int, int]) -> None:
    assert format.scale_shape(rows, columns) == shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", 8, (128, 128), "bf16"), "scales of float32 or e8m0"),
        (("x", 6, (128, 128), "float32"), "has 8 or 4 bits"),
        (("x", 8, (128, -1), "float32"), "two numbers of rows and columns"),
        (("x", 8, (128,), "float32"), "two numbers of rows and columns"),
        (("x", 8, (128, 128), "float32", "per_token"), "activation_scheme must be one of"),
        (("x", 0, None, "e8m0"), "without blocks has no scales"),
        (("x", 8), "without blocks has no scales"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Format(*arguments)


def test_dense_needs_no_scales() -> None:
    dense = FORMATS["dense"]
    assert not dense.quantized
    assert (dense.scale_dtypes, dense.per_element) == ((), 1)
    assert FORMATS["mxfp4"].payload_dtypes == (torch.int8, torch.uint8)
