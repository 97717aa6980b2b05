"""`deepgemm` and `deepgemm_megamoe` over the contract: our kernels in Triton's interpreter, the library a stand-in.

A script and not a test: TRITON_INTERPRET has to be set before the kernels are imported.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import standins
from standins import deep_gemm

import moetor.backends.deepgemm as deepgemm
import moetor.backends.deepgemm_megamoe as megamoe
from moetor import Backend, ExpertsInterface, ExpertWeights
from moetor.backends import external
from moetor.kernels.external import buffers
from moetor.quantization import dequantize_experts, quantize_experts
from moetor.testing import Case, check_backend, contract, make_inputs, relative_error
from moetor.testing.cases import EVERYTHING, ROUTINGS

# Both write bfloat16 before they round to e4m3 again, which sends some numbers to the other side of one of its steps.
contract.QUANTIZED_LIMIT = 2e-2

BF16 = Case(tokens=7, intermediate=64, dtype=torch.bfloat16, frozen=EVERYTHING)
FP8 = replace(BF16, format="fp8", hidden=256, intermediate=128)
MEGA = replace(FP8, hidden=512, intermediate=256)

DENSE_CASES = [
    *[replace(BF16, routing=routing) for routing in ROUTINGS],
    replace(BF16, tokens=0),
    replace(BF16, tokens=1, bias=True),
    replace(BF16, layout="transposed", gate="gpt_oss", bias=True),
    replace(BF16, layout="interleaved", gate="gpt_oss", bias=True),
    replace(BF16, gated=False, gate="relu2", bias=True),
    replace(BF16, experts=33, top_k=8, tokens=5),
    replace(BF16, experts=1, top_k=1, tokens=130),
    replace(BF16, hidden=192, intermediate=128),
]
FP8_CASES = [
    replace(FP8, bias=True, gate="gpt_oss", layout="interleaved", routing="sentinels"),
    replace(FP8, gated=False, gate="relu2", tokens=1),
    replace(FP8, routing="one_expert", hidden=384, intermediate=256, format="fp8_e8m0"),
]
MEGA_CASES = [
    replace(MEGA, gate="limit", routing="sentinels"),
    replace(MEGA, routing="int32", tokens=2),
    replace(MEGA, format="fp8_e8m0", tokens=3),
    replace(MEGA, tokens=0),
]


def round_as_hardware_does() -> None:
    """The interpreter's own conversions cut bfloat16 off, and lose the carry to e4m3: 31.3 becomes 16 and not 32."""
    from triton.runtime import interpreter

    original = interpreter._convert_float
    dtypes = {"fp8e4nv": (torch.float8_e4m3fn, torch.uint8), "bf16": (torch.bfloat16, torch.uint16)}

    def convert(input, input_dtype, output_dtype, rounding_mode):
        if str(output_dtype) not in dtypes or str(input_dtype) != "fp32":
            return original(input, input_dtype, output_dtype, rounding_mode)
        dtype, bits = dtypes[str(output_dtype)]
        numbers = torch.from_numpy(np.ascontiguousarray(input).view(np.float32))
        return numbers.to(dtype).view(bits).numpy().reshape(input.shape)

    interpreter._convert_float = convert


def preparing(backend: Backend) -> Backend:
    """The backend for weights as they are: each call prepares them."""

    def prepared(weights: ExpertWeights) -> ExpertWeights:
        return backend.prepare(weights) if weights.quantized else weights

    def forward(weights, *call):
        return backend.forward(prepared(weights), *call)

    return replace(backend, forward=forward, why_not=lambda weights, call: backend.why_not(prepared(weights), call))


def buffers_are_made_once_and_grow_and_are_freed() -> None:
    inputs = make_inputs(replace(MEGA, tokens=9))
    weights = megamoe.prepare(quantize_experts(make_inputs(replace(MEGA, format="dense")).weights, "fp8"))
    buffers.free_buffers()
    deep_gemm.calls.clear()
    x, ids, routing = inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights
    buffers.SMALLEST = 4
    for tokens in (3, 4, 9, 2):
        megamoe.forward(weights, x[:tokens], ids[:tokens], routing[:tokens])
    assert [call for call in deep_gemm.calls if call != "mega"] == ["buffer 4", "buffer 16"]
    kept = [buffer.memory for each in buffers._buffers.values() for buffer in each]
    assert len(kept) == 2
    buffers.free_buffers()
    assert all(memory.destroyed for memory in kept)
    assert not buffers._buffers


def by_powers_of_two(x: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3 with a scale for each 128 columns, the next power of two of amax / 448."""
    groups = x.view(-1, 128)
    scale = torch.exp2((groups.abs().amax(1, keepdim=True) / 448).log2().ceil())
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(x.shape)


def on_sm100_by_powers_of_two() -> None:
    """FP8 and FP4 with scales of exponents, against the same roundings one pair after another."""
    external.major = lambda weights: 10
    for format in ("fp8_e8m0", "mxfp4_dynamic"):
        inputs = make_inputs(replace(FP8, format=format, bias=True, routing="sentinels", hidden=384))
        x, ids, routing = inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights
        got = deepgemm.forward(deepgemm.prepare(inputs.weights), x, ids, routing)
        dense, expected = dequantize_experts(inputs.weights, torch.float32), torch.zeros(x.shape)
        for token, slot in ((ids >= 0) & (ids < dense.num_experts)).nonzero().tolist():
            (up,), down, expert = dense.ups, dense.down, int(ids[token, slot])
            # which the library writes in bfloat16
            product = (up.data[expert] @ by_powers_of_two(x[token].float())).bfloat16() + up.bias[expert].float()
            inner = by_powers_of_two(dense.activation.apply(*product.chunk(2)))
            expected[token] += routing[token, slot] * (down.data[expert] @ inner + down.bias[expert].float())
        error = relative_error(got, expected)
        print(f"sm100 {format}: {error:.1e}")
        assert error <= contract.LIMITS[torch.bfloat16]
    print("sm100: passed")


def main() -> None:
    round_as_hardware_does()
    buffers.group_of_one = lambda device: None
    for backend, cases in ((deepgemm, [*DENSE_CASES, *FP8_CASES]), (megamoe, MEGA_CASES)):
        name = standins.register(preparing(backend.BACKEND), deep_gemm, "deep_gemm")
        report = check_backend(name, cases)
        print(report, flush=True)
        assert report.passed == len(cases)
        ExpertsInterface.unregister(name)
    buffers_are_made_once_and_grow_and_are_freed()
    print("buffers: passed")
    on_sm100_by_powers_of_two()


if __name__ == "__main__":
    main()
