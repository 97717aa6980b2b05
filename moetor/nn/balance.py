"""How evenly tokens spread over the experts, and the loss that evens it out.

Letters: E experts, K experts per token.
"""

import torch
from torch import Tensor


def tokens_per_expert(top_k_index: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: how many tokens chose each expert.

    Args:
        top_k_index: (…, K); ids outside [0, E), such as -1, count for none.

    >>> tokens_per_expert(torch.tensor([[1, 0], [1, -1]]), num_experts=3)
    tensor([1, 2, 0])
    """
    ids = top_k_index.flatten().long()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    # integers: the same sums in any order, and unlike bincount no host sync
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, ids, torch.ones_like(ids))[:num_experts]


def load_balancing_loss(logits: Tensor, top_k_index: Tensor, mask: Tensor | None = None) -> Tensor:
    """E · Σ_e f_e · p_e for a softmax router; K when all experts are used alike, up to E when they are not.

    f_e is how many of an expert's tokens there are per token, p_e the mean of its probability, which carries
    the gradient. It is to be added to a model's loss with a small factor, often 0.001 to 0.01, for each layer.

    Args:
        logits: (…, E), of the router.
        top_k_index: (…, K).
        mask: (…) bool, the tokens that count; None: all.

    Returns:
        A scalar in fp32 (float64 for float64); NaN if no token counts.

    Source: Switch Transformer, arXiv:2101.03961, equations 4 to 6; for K > 1 as in transformers' Mixtral.

    >>> load_balancing_loss(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]]))
    tensor(1.)
    """
    num_experts = logits.shape[-1]
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).reshape(-1, num_experts)
    if mask is None:
        mask = torch.ones(top_k_index.shape[:-1], dtype=torch.bool, device=logits.device)
    counts = tokens_per_expert(top_k_index.masked_fill(~mask[..., None], -1), num_experts)
    num_tokens = mask.sum()
    mean_probability = (probabilities * mask.reshape(-1, 1)).sum(0) / num_tokens
    return num_experts * (counts / num_tokens * mean_probability).sum()
