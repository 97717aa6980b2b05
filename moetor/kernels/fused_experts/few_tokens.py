"""The layer for a few tokens: two launches, prepared once for a shape."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import table
from .launcher import launch
from .operands import matrices
from .sizes import cdiv
from .vectors import down_vector, up_vector


@dataclass(slots=True)
class _Plan:
    """Two launches for a few tokens with everything but the addresses filled in.

    At one token the kernels take 20 µs; working out their arguments anew would take longer.
    """

    inner: tuple[int, int]
    first_grid: tuple[int, int, int]
    first_numbers: tuple[Any, ...]
    second_grid: tuple[int, int, int]
    second_numbers: tuple[Any, ...]
    first: Any = None
    second: Any = None


# A model has one for each number of tokens up to FEW_TOKENS and each shape of layer.
_PLANS: dict[tuple[Any, ...], _Plan] = {}
_MOST_PLANS = 1024


def few_tokens(
    x: Tensor, ids: Tensor, routing: Tensor, up: list[Tensor], up_bias: list[Tensor], down: Tensor,
    down_bias: Tensor | None, out: Tensor, interleaved: bool, gate: tuple[Any, ...],
) -> None:  # fmt: skip
    weights = (*up, *up_bias, down) if down_bias is None else (*up, *up_bias, down, down_bias)
    device = x.device.index
    key = (
        device, x.shape, x.stride(), x.dtype, ids.shape, ids.dtype, routing.dtype, interleaved, gate, len(up),
        len(up_bias), *[(w.dtype, w.shape, w.stride()) for w in weights],
        *[tensor.data_ptr() % 16 for tensor in (x, ids, routing, *weights)],
    )  # fmt: skip
    plan = _PLANS.get(key)
    bias, second_bias = (up_bias[0], up_bias[-1]) if up_bias else (None, None)
    if plan is not None:
        inner = torch.empty(plan.inner, dtype=x.dtype, device=x.device)
        first_args = (x, ids, up[0], up[-1], bias, second_bias, inner, *plan.first_numbers)
        launch(plan.first, plan.first_grid, first_args, device)
        second_args = (inner, ids, down, down_bias, routing, out, *plan.second_numbers)
        launch(plan.second, plan.second_grid, second_args, device)
        return
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    plan = _plan(x, ids, up, up_bias, down, down_bias, interleaved, gate)
    inner = torch.empty(plan.inner, dtype=x.dtype, device=x.device)
    first, second = _vectors(x.shape[0], up[0], down)
    plan.first = up_vector[plan.first_grid](
        x, ids, up[0], up[-1], bias, second_bias, inner, *plan.first_numbers, num_warps=first.warps
    )
    plan.second = down_vector[plan.second_grid](
        inner, ids, down, down_bias, routing, out, *plan.second_numbers, num_warps=second.warps
    )
    if plan.first is not None:  # Triton's interpreter compiles nothing
        _PLANS[key] = plan  # only now: another thread may look


def _vectors(num_tokens: int, up: Tensor, down: Tensor) -> tuple[table.Vector, table.Vector]:
    return table.up_vector(num_tokens, up.stride(2) == 1), table.down_vector(num_tokens, down.stride(2) == 1)


def _plan(
    x: Tensor, ids: Tensor, up: list[Tensor], up_bias: list[Tensor], down: Tensor, down_bias: Tensor | None,
    interleaved: bool, gate: tuple[Any, ...],
) -> _Plan:  # fmt: skip
    operands = matrices(up, up_bias, gate[1], interleaved)
    (T, H), K, E, I = x.shape, ids.shape[1], up[0].shape[0], operands.N
    first, second = _vectors(T, up[0], down)
    down_bias_strides = (0, 0) if down_bias is None else down_bias.stride()
    return _Plan(
        inner=(T * K, I),
        first_grid=(cdiv(I, first.BN), T * K, 1),
        first_numbers=(E, H, I, K, *x.stride(), *operands.strides, operands.offset, *operands.bias_strides,
                       operands.bias_offset, first.BN, first.BK, first.stages, bool(up_bias), H % first.BK == 0, *gate),
        second_grid=(cdiv(H, second.BN), T, 1),
        second_numbers=(E, H, I, *down.stride(), *down_bias_strides, K, second.BN, second.BK, second.stages,
                        down_bias is not None, I % second.BK == 0),
    )  # fmt: skip
