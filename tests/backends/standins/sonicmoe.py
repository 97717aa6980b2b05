"""A stand-in for SonicMoE 0.1.2.post1, in plain torch: real signatures, demands and gates, with gradients.

Where the real one reads and writes beyond its tables, for an id outside [0, E), this one fails.
"""

from enum import Enum
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor


class ActivationType(Enum):
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"


enums = SimpleNamespace(ActivationType=ActivationType)
GATES = {
    ActivationType.SWIGLU: F.silu,
    ActivationType.GEGLU: lambda x: F.gelu(x, approximate="tanh"),
    ActivationType.REGLU: F.relu,
}
calls: list[bool] = []


def moe_general_routing_inputs(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int,
    stream_id: int,
    activation_type: ActivationType,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    calls.append(is_inference_mode_enabled)
    assert not torch.compiler.is_compiling()
    assert (b1 is None) == (b2 is None)
    assert x.dtype == w1.dtype == w2.dtype == torch.bfloat16
    assert x.is_contiguous()
    (_, H, _), I = w1.shape, w2.shape[1]
    assert w1.shape == (2 * I, H, E)
    assert w2.shape == (H, I, E)
    # strides as of (E, 2I, H) and (E, H, I)
    assert w1.permute(2, 0, 1).is_contiguous()
    assert w2.permute(2, 0, 1).is_contiguous()
    for tensor in (x, w1, w2):
        assert tensor.data_ptr() % 16 == 0
    assert H % 8 == 0
    assert I % 8 == 0
    assert router_scores.dtype == torch.float32
    assert token_indices.dtype == expert_indices.dtype == torch.int32
    assert router_scores.shape == token_indices.shape == expert_indices.shape == (len(router_scores),)
    assert bool((token_indices.diff() >= 0).all()), "tokens ascend"
    assert bool(((expert_indices >= 0) & (expert_indices < E)).all()), "beyond its tables"

    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(E):
        (pairs,) = (expert_indices == expert).nonzero(as_tuple=True)
        tokens = token_indices[pairs].long()
        product = x[tokens].float() @ w1[:, :, expert].float().t()
        if b1 is not None:
            product = product + b1[expert].float()
        gate, up = product.chunk(2, dim=1) if concat_layout else (product[:, 0::2], product[:, 1::2])
        inner = (GATES[activation_type](gate) * up).to(x.dtype)
        rows = inner.float() @ w2[:, :, expert].float().t()
        if b2 is not None:
            rows = rows + b2[expert].float()
        out = out.index_add(0, tokens, rows.to(x.dtype).float() * router_scores[pairs, None])
    return out.to(x.dtype), torch.bincount(expert_indices.long(), minlength=E)
