"""The layer as a function and as an operator, and its weights in the order that the kernel reads."""

from typing import Any

import torch
from torch import Tensor

from ..external import buffers
from ..external.packages import loaded
from ..external.requirements import DEEP_GEMM
from ..fused_experts.launcher import Launcher
from ..fused_experts.sizes import cdiv, next_power_of_2
from ..library import define, needs_operator
from .fill import fill

_fill = Launcher(fill)


def prepare_fp8(
    up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """e4m3 stacks with float32 scales as SM90's kernel reads them: rows of gate and up by turns, eight at a time.

    Args:
        up, up_scale: (E, 2I, H), gate rows first, and (E, 2I/128, H/128).
        down, down_scale: (E, H, I) and (E, H/128, I/128).
    """
    first, second = loaded(DEEP_GEMM).transform_weights_for_mega_moe_sm90((up, up_scale), (down, down_scale))
    return tuple(first), tuple(second)


def megamoe_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: tuple[Tensor, ...],
    down: tuple[Tensor, ...],
    limit: float | None,
) -> Tensor:
    """The layer's result (T, H).

    Args:
        x_TH: (T, H) bfloat16; rounded to e4m3 on the way into the buffer.
        ids_TK, routing_TK: (T, K) ids of experts (others add nothing) and float weights.
        up, down: from `prepare_fp8`.
        limit: clamp of gate, from above, and of up, to both sides.
    """
    run = torch.ops.moetor.megamoe_experts if needs_operator(x_TH) else _megamoe_experts
    out: Tensor = run(x_TH, ids_TK, routing_TK, up[0], up[1], down[0], down[1], limit)
    return out


def _megamoe_experts(
    x: Tensor, ids: Tensor, routing: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor,
    limit: float | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (T, H), K, E, I = x.shape, ids.shape[1], up.shape[0], down.shape[2]
    if not T:
        return out
    library = loaded(DEEP_GEMM)
    with torch.cuda.device_of(x):
        buffer = _buffer(library, x.device, E, T, K, H, I)
        groups = min(8, next_power_of_2(cdiv(H, 128)))
        strides = (buffer.x.stride(0), buffer.x_sf.stride(0), buffer.topk_idx.stride(0), buffer.topk_weights.stride(0))
        _fill.launch(
            (T, cdiv(H, 128 * groups), 1),
            (x, ids.contiguous(), routing.contiguous(), buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights,
             E, H, K, *x.stride(), *strides),
            (groups, next_power_of_2(K)), 4, 3, x.device.index or 0,
        )  # fmt: skip
        library.fp8_mega_moe(out, (up, up_scale), (down, down_scale), buffer, activation_clamp=limit)
    return out


def _buffer(library: Any, device: torch.device, E: int, T: int, K: int, H: int, I: int) -> Any:
    """One for all layers of a shape: they run one after another, on one stream."""

    def make(num_tokens: int) -> Any:
        return library.get_symm_buffer_for_mega_moe(
            buffers.group_of_one(device),
            num_experts=E,
            num_max_tokens_per_rank=num_tokens,
            num_topk=K,
            hidden=H,
            intermediate_hidden=I,
        )

    return buffers.buffer_for(("megamoe", device, E, K, H, I), T, make)


define(
    "megamoe_experts(Tensor x, Tensor ids, Tensor routing, Tensor up, Tensor up_scale, Tensor down, Tensor down_scale,"
    " float? limit) -> Tensor",
    _megamoe_experts,
    lambda x, *_: x.new_empty(x.shape),
)
