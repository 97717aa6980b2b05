"""A layer of experts by SonicMoE's kernels, forward and backward.

Letters: T tokens, K experts per token, S = T·K pairs, E experts, H hidden size, I intermediate size.

Pairs of no expert have no place in the library: it reads and writes beyond its tables for ids outside [0, E)
(0.1.2.post1). So they are sent to an expert, with a weight of 0, and their token, if it has no expert at all, with a
row of zeros, which keeps what the row held away from results and gradients.
"""

import functools
import importlib
import inspect

import torch
from torch import Tensor

from .external.packages import loaded
from .external.requirements import SONIC_MOE
from .library import define, needs_operator

GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}
"""Our names of gates, and the library's."""


def sonicmoe_experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    routing_TK: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    kind: str,
    interleaved: bool,
) -> Tensor:
    """The layer's result (T, H), with gradients of everything but ids.

    Args:
        x_TH: (T, H) bfloat16.
        ids_TK, routing_TK: (T, K) ids of experts (others add nothing) and float weights.
        up, down: (E, 2I, H), gate rows first or interleaved, and (E, H, I), contiguous.
        up_bias, down_bias: (E, 2I) and (E, H), or neither.
        kind: of the gate, a key of `GATES`.
    """
    if needs_operator(x_TH):
        out: Tensor = _Opaque.apply(x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, kind, interleaved)
        return out
    if not x_TH.shape[0]:
        return _no_tokens(x_TH, routing_TK, up, up_bias, down, down_bias)
    return _run(x_TH, ids_TK, routing_TK, up, up_bias, down, down_bias, kind, interleaved)


def _run(
    x: Tensor, ids: Tensor, routing: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, kind: str, interleaved: bool,
) -> Tensor:  # fmt: skip
    library = loaded(SONIC_MOE)
    (T, K), E = ids.shape, up.shape[0]
    expert_TK, routing, has_expert_T1 = _every_pair_an_expert(ids, routing, E)
    token_S = torch.arange(T * K, device=x.device, dtype=torch.int32) // K
    training = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, routing, up, up_bias, down, down_bias)
    )
    with torch.cuda.device_of(x):
        out, _ = library.moe_general_routing_inputs(
            torch.where(has_expert_T1, x, 0),
            routing.reshape(-1),
            token_S,
            expert_TK.reshape(-1),
            up.permute(1, 2, 0),
            up_bias,
            down.permute(1, 2, 0),
            down_bias,
            E,
            torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0,
            library.enums.ActivationType(GATES[kind]),
            not training,
            not interleaved,
        )
    result: Tensor = out
    return result


def _every_pair_an_expert(ids: Tensor, routing: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 ids in [0, E), fp32 weights, 0 where there was no expert, and (T, 1) whether a token has one.

    >>> ids = torch.tensor([[1, -1], [2, 2]])
    >>> _every_pair_an_expert(ids, torch.ones(2, 2), num_experts=2)
    (tensor([[1, 1],
            [0, 1]], dtype=torch.int32), tensor([[1., 0.],
            [0., 0.]]), tensor([[ True],
            [False]]))
    """
    has_expert = (ids >= 0) & (ids < num_experts)
    largest_T1 = torch.where(has_expert, ids, -1).amax(1, keepdim=True)
    # an expert that the token goes to anyway, else one after another, so that none gets all of the padding
    spare = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % num_experts
    substitute = torch.where(largest_T1 >= 0, largest_T1, spare)
    expert = torch.where(has_expert, ids, substitute).to(torch.int32)
    return expert, torch.where(has_expert, routing.float(), 0.0), largest_T1 >= 0


def _no_tokens(
    x: Tensor, routing: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> Tensor:
    """(0, H), connected to every tensor: the library has no launch of nothing."""
    product = x @ up[0].t()
    if up_bias is not None:
        product = product + up_bias[0].to(x.dtype)
    out = product[:, : down.shape[2]] @ down[0].t()
    if down_bias is not None:
        out = out + down_bias[0].to(x.dtype)
    return out * routing.sum().to(x.dtype)


@functools.cache
def compiles(kind: str) -> bool:
    """Whether the loaded build has this gate: some list reglu, and then assert that it is none of theirs."""
    functions = importlib.import_module(f"{loaded(SONIC_MOE).__name__}.functional.forward")
    return f'"{GATES[kind]}"' in inspect.getsource(functions)


class _Opaque(torch.autograd.Function):
    """For tracing: the library refuses to run then. The backward pass runs the forward pass once more."""

    @staticmethod
    def forward(*arguments):  # type: ignore[no-untyped-def]
        return torch.ops.moetor.sonicmoe_experts(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs[:7])
        ctx.gate = inputs[7:]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, ids, routing, up, up_bias, down, down_bias = ctx.saved_tensors
        grads = torch.ops.moetor.sonicmoe_experts_backward(
            grad.contiguous(), x, ids, routing, up, up_bias, down, down_bias, *ctx.gate
        )
        g_x, g_routing, g_up, g_down = grads[:4]
        g_up_bias, g_down_bias = grads[4:] if up_bias is not None else (None, None)
        return g_x, None, g_routing, g_up, g_up_bias, g_down, g_down_bias, None, None


def _forward_op(
    x: Tensor, ids: Tensor, routing: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, kind: str, interleaved: bool,
) -> Tensor:  # fmt: skip
    if not x.shape[0]:
        return torch.empty_like(x)
    with torch.no_grad():
        return _run(x, ids, routing, up, up_bias, down, down_bias, kind, interleaved)


def _backward_op(
    grad: Tensor, x: Tensor, ids: Tensor, routing: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, kind: str, interleaved: bool,
) -> list[Tensor]:  # fmt: skip
    # an operator runs below autograd, which the library's own Functions need
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with below, torch.enable_grad():
        named = {"x": x, "routing": routing, "up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items() if tensor is not None}
        biases = leaves.get("up_bias"), leaves.get("down_bias")
        if not x.shape[0]:
            return [torch.zeros_like(leaf) for leaf in leaves.values()]
        out = _run(
            leaves["x"], ids, leaves["routing"], leaves["up"], biases[0], leaves["down"], biases[1], kind, interleaved
        )
        return list(torch.autograd.grad(out, list(leaves.values()), grad))


_ARGUMENTS = (
    "Tensor x, Tensor ids, Tensor routing, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias,"
    " str kind, bool interleaved"
)
define(f"sonicmoe_experts({_ARGUMENTS}) -> Tensor", _forward_op, lambda x, *_: x.new_empty(x.shape), gradient=_Opaque)
define(
    f"sonicmoe_experts_backward(Tensor grad, {_ARGUMENTS}) -> Tensor[]",
    _backward_op,
    lambda grad, x, ids, routing, up, up_bias, down, down_bias, kind, interleaved: [
        torch.empty_like(tensor) for tensor in (x, routing, up, down, up_bias, down_bias) if tensor is not None
    ],
)
