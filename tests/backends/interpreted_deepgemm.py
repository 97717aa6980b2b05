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
from moetor.kernels.external import buffers
from moetor.quantization import quantize_experts
from moetor.testing import Case, check_backend, contract, make_inputs
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


if __name__ == "__main__":
    main()
