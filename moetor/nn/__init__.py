"""MoE layers for people who write their own models: the experts, the routers that choose them, the block of both.

>>> import torch, moetor
>>> block = moetor.nn.MoE(
...     moetor.nn.SoftmaxTopKRouter(hidden_size=16, num_experts=8, top_k=2, normalize=True),
...     moetor.nn.Experts(num_experts=8, hidden_size=16, intermediate_size=32),
...     shared_experts=moetor.nn.MLP(hidden_size=16, intermediate_size=24),
... )
>>> block(torch.ones(3, 5, 16)).shape
torch.Size([3, 5, 16])
"""

from .balance import load_balancing_loss, tokens_per_expert
from .block import MLP, MoE
from .experts import Experts
from .routers import Router, RouterOptions, Routing, SoftmaxTopKRouter, TopKSoftmaxRouter
from .sigmoid_router import SigmoidTopKRouter

__all__ = [
    "MLP",
    "Experts",
    "MoE",
    "Router",
    "RouterOptions",
    "Routing",
    "SigmoidTopKRouter",
    "SoftmaxTopKRouter",
    "TopKSoftmaxRouter",
    "load_balancing_loss",
    "tokens_per_expert",
]
