"""Products with packed bytes: exact in every code, right for any size, by each vector type that the source has."""

import ctypes
import logging

import pytest
import torch
from torch import Tensor

from moetor.core.formats import FORMATS, fp8
from moetor.kernels import packed_experts_cpu as packed
from moetor.kernels.packed_experts_cpu import build, rows
from moetor.kernels.packed_experts_cpu.reference import packed_rows as reference
from moetor.quantization import dequantize, quantize
from moetor.quantization.codes import decode
from moetor.testing import relative_error

if packed.compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

# By flags of the compiler: vectors of 16 float32, of 8, and single ones; "native" is what runs.
VARIANTS = {"native": None, "avx2": ("-mavx2", "-mfma", "-mf16c"), "single": ()}


@pytest.fixture(scope="module", params=VARIANTS)
def compiled(request, tmp_path_factory):
    flags = VARIANTS[request.param]
    if flags is None:
        yield
        return
    if request.param == "avx2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    patch = pytest.MonkeyPatch()
    patch.setenv("MOETOR_CACHE", str(tmp_path_factory.mktemp("cache")))
    function = ctypes.CDLL(str(build._built(packed.compiler(), flags))).moetor_packed_rows
    function.argtypes, function.restype = build._ARGUMENTS, None
    patch.setattr(rows, "function", lambda: function)
    yield
    patch.undo()


def run(x: Tensor, experts: list, data: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    out = torch.full((x.shape[0], data.shape[1]), 7.0)
    packed.packed_rows(x.contiguous(), experts, data, scale, block, out)
    return out


@pytest.mark.parametrize("format", ["fp8_tensor_weights", "mxfp4_float32"])
def test_every_byte_means_what_it_means_everywhere(compiled, format: str) -> None:
    """Rows of the identity read the numbers of a matrix out of it, one by one."""
    byte = torch.arange(256, dtype=torch.uint8)
    byte = byte[(byte & 127) != 127] if format.startswith("fp8") else byte
    data = byte.view(1, 1, -1).view(FORMATS[format].payload_dtypes[0])
    values = decode(data, FORMATS[format])[0, 0]
    K = len(values)
    scale = torch.full((1, *FORMATS[format].scale_shape(1, K)), 3.0)
    out = run(torch.eye(K), [(0, 0, K)], data, scale, FORMATS[format].block)
    assert torch.equal(out[:, 0], 3 * values)


def test_nan_among_the_weights_is_nan_in_the_result(compiled) -> None:
    data = torch.ones(1, 3, 40).to(torch.float8_e4m3fn)
    data.view(torch.uint8)[0, 0, 5], data.view(torch.uint8)[0, 2, 39] = 127, 255
    out = run(torch.ones(2, 40), [(0, 0, 2)], data, torch.ones(1, 1, 1), (0, 0))
    assert out.isnan().tolist() == [[True, False, True]] * 2


def test_every_exponent_of_a_scale_is_a_power_of_two(compiled) -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    out = run(torch.ones(1, 1), [(0, 0, 1)], torch.ones(1, 256, 1).to(torch.float8_e4m3fn), scale, (1, 0))
    assert torch.equal(out[0, :255], 2.0 ** (torch.arange(255).double() - 127).float())
    assert out[0, 255].isnan()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("format", "N", "K"),
    [
        ("fp8", 260, 300),
        ("fp8_e8m0", 129, 128),
        (fp8((32, 16)).name, 33, 63),
        ("fp8_tensor", 3, 1),
        (fp8((1, 0)).name, 17, 130),
        ("mxfp4", 37, 96),
        ("mxfp4_float32", 4, 32),
    ],
)
def test_rows_of_some_experts_are_right(compiled, format: str, N: int, K: int, num_rows: int) -> None:
    parts = [quantize(torch.randn(N, K), FORMATS[format]) for _ in range(4)]
    data, scale = torch.stack([one for one, _ in parts]), torch.stack([_bytes(one) for _, one in parts])
    x, experts = torch.randn(num_rows + 2, K), [(2, 0, num_rows), (0, num_rows, num_rows + 1)]
    out = run(x, experts, data, scale, FORMATS[format].block)
    for expert, first, end in experts:
        exact = x[first:end].double() @ dequantize(*parts[expert], FORMATS[format], torch.float64).t()
        assert relative_error(out[first:end], exact) <= 1e-6
    assert (out[num_rows + 1] == 7).all()  # a row of no expert
    block = tuple(size or extent for size, extent in zip(FORMATS[format].block, (N, K), strict=True))
    numbers = decode(torch.arange(256, dtype=torch.uint8).view(256, 1), FORMATS[format]).double()
    plain = reference(x[:num_rows].double(), experts[:1], data, _numbers(scale, format), numbers, block)
    assert relative_error(plain, out[:num_rows]) <= 1e-6


def _bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale


def _numbers(scale: Tensor, format: str) -> Tensor:
    return scale.view(torch.float8_e8m0fnu).float() if FORMATS[format].scale == "e8m0" else scale


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_result_does_not_depend_on_threads_or_on_the_rows_beside(format: str) -> None:
    N, K = 512, 512
    payload, scale = quantize(torch.randn(1, N, K), FORMATS[format])
    x, before = torch.randn(5, K), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run(x, [(0, 0, 5)], payload, scale, FORMATS[format].block))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    alone = torch.cat([run(x[row : row + 1], [(0, 0, 1)], payload, scale, FORMATS[format].block) for row in range(5)])
    assert torch.equal(alone, results[0])


def test_it_is_compiled_once_and_says_so(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("MOETOR_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "moetor")
    first = build._built(packed.compiler(), ())
    assert [record.message.split(" by ")[0] for record in caplog.records] == [
        "compiled the CPU code of quantised experts"
    ]
    assert build._built(packed.compiler(), ()) == first
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == [first]


@pytest.mark.parametrize("command", ["false", "no-such-compiler"])
def test_without_a_compiler_that_works_there_is_no_function(monkeypatch, tmp_path, command) -> None:
    monkeypatch.setenv("MOETOR_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", command)
    assert build.function.__wrapped__() is None
