"""The MoE block of a model: a router, the experts it chooses from, and experts that every token visits.

Letters: H hidden size, I intermediate size.
"""

from typing import Literal, overload

import torch
from torch import Tensor, nn

from ..core.activation import Activation
from ..core.errors import InvalidInput
from .routers import Routing


class MLP(nn.Module):
    """One expert that is not chosen: down(f(gate(x)) · up(x)). Several shared ones are a single wide one.

    Args:
        hidden_size, intermediate_size: H, I.
        activation: a kind out of `moetor.core.activation.KINDS`, or an `Activation` of that form.
        bias: of all three linear layers.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: a custom activation; its function takes gate and up in one tensor, which is not here.

    >>> MLP(hidden_size=4, intermediate_size=6)(torch.ones(3, 5, 4)).shape
    torch.Size([3, 5, 4])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = Activation(activation) if isinstance(activation, str) else activation
        if self.activation.fn is not None:
            raise InvalidInput("an MLP needs an activation of one of the known kinds, got a custom function")
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(…, H) to (…, H)."""
        inner = self.activation.apply(self.gate_proj(hidden_states), self.up_proj(hidden_states))
        out: Tensor = self.down_proj(inner)
        return out


class MoE(nn.Module):
    """Router, experts and shared experts, put together: experts(x) + shared_experts(x).

    With `shared_expert_gate` it is experts(x) + sigmoid(shared_expert_gate(x)) · shared_experts(x),
    as in Qwen2-MoE.

    Args:
        gate: the router; called as gate(x), returns a `Routing`. Named as in the checkpoints of Mixtral,
            Qwen and DeepSeek, whose blocks' parameters have these names.
        experts: `Experts`, or any module called as experts(x, top_k_index, top_k_weights).
        shared_experts: any module from (…, H) to (…, H), such as `MLP`.
        shared_expert_gate: any module from (…, H) to (…, 1), such as `nn.Linear(H, 1, bias=False)`.

    Raises:
        InvalidInput: router and experts of different sizes, or a gate without shared experts.

    See `moetor.nn` for an example.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        shared_experts: nn.Module | None = None,
        shared_expert_gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for size in ("num_experts", "hidden_size"):
            of_gate, of_experts = getattr(gate, size, None), getattr(experts, size, None)
            if of_gate is not None and of_experts is not None and of_gate != of_experts:
                raise InvalidInput(f"router and experts must agree on {size}, got {of_gate} and {of_experts}")
        if shared_expert_gate is not None and shared_experts is None:
            raise InvalidInput("shared_expert_gate needs shared_experts, got None")
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.shared_expert_gate = shared_expert_gate

    @overload
    def forward(self, hidden_states: Tensor, return_routing: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, hidden_states: Tensor, return_routing: Literal[True]) -> tuple[Tensor, Routing]: ...

    def forward(self, hidden_states: Tensor, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Run the block.

        Args:
            hidden_states: (…, H).
            return_routing: return the router's decision as well, for a loss that balances the experts.

        Returns:
            (…, H) in the dtype of hidden_states, or that and the `Routing`.
        """
        routing: Routing = self.gate(hidden_states)
        out: Tensor = self.experts(hidden_states, routing.top_k_index, routing.top_k_weights)
        if self.shared_experts is not None:
            shared: Tensor = self.shared_experts(hidden_states)
            if self.shared_expert_gate is not None:
                shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * shared
            out = out + shared.to(out.dtype)
        return (out, routing) if return_routing else out
