"""The ways in which blocks of others choose experts: from logits of their own, or by a gate that does it all.

Letters: T tokens, K experts per token, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....core.errors import InvalidInput

# (logits (T, E), K) -> (top_k_index, top_k_weights), both (T, K)
Rule = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def softmax_top_k(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Jamba, OLMoE, and Qwen2-MoE where weights need not add up to 1."""
    weights_TK, index_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return index_TK, weights_TK


def softmax_top_k_normed(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Mixtral, Qwen3-MoE. The same as a softmax over the chosen logits."""
    index_TK, weights_TK = softmax_top_k(logits_TE, top_k)
    return index_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def sigmoid_top_k(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights_TK, index_TK = logits_TE.float().sigmoid().topk(top_k, dim=-1)
    return index_TK, weights_TK


def sigmoid_top_k_normed(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    index_TK, weights_TK = sigmoid_top_k(logits_TE, top_k)
    return index_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


RULES: dict[str, Rule] = {
    rule.__name__: rule for rule in (softmax_top_k_normed, softmax_top_k, sigmoid_top_k_normed, sigmoid_top_k)
}


def from_gate(who: str, said: Any) -> tuple[Tensor, Tensor]:
    """Index and weights (T, K) out of what a gate like DeepSeek's returns: both, in either order, and maybe a loss."""
    tensors = [each for each in said if isinstance(each, Tensor)] if isinstance(said, (tuple, list)) else []
    index = [each for each in tensors if not each.is_floating_point()]
    weights = [each for each in tensors if each.is_floating_point() and index and each.shape == index[0].shape]
    if len(index) != 1 or len(weights) != 1:
        raise InvalidInput(f"{who}'s gate does not return the chosen experts and their weights")
    if len(tensors) > 2:
        raise InvalidInput(
            f"{who}'s gate returns a loss beside the routing, which moetor would drop; call model.eval()"
        )
    top_k = index[0].shape[-1]
    return index[0].reshape(-1, top_k), weights[0].reshape(-1, top_k)
