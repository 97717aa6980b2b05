"""The experts of one layer as a module of one's own.

Letters: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

import math

import torch
from torch import Tensor, nn

from ..core.activation import Activation
from ..core.errors import InvalidInput
from ..core.interface import ExpertsInterface, Explanation, describe_call
from ..core.weights import ExpertWeights, Weight
from ..forward import experts_forward


class Experts(nn.Module):
    """E experts, run by the backend that is chosen for the layer or for a call.

    An expert is down(f(gate(x)) · up(x)), or down(f(up(x))) if not `gated`. Parameters have the
    names and shapes that transformers' models give theirs:

    - `gate_up_proj` (E, 2I, H), gate rows first, or every other row if `interleaved`;
      `up_proj` (E, I, H) if not gated; `down_proj` (E, H, I);
    - stored (E, H, 2I), (E, H, I) and (E, I, H) if `transposed`;
    - with `bias`: `gate_up_proj_bias` (E, 2I) or `up_proj_bias` (E, I), and `down_proj_bias` (E, H).

    Attributes:
        backend: a name from `ExpertsInterface.names()`; assign another at any time.

    Args:
        num_experts, hidden_size, intermediate_size: E, H, I.
        activation: a kind out of `moetor.core.activation.KINDS`, or an `Activation` with limits,
            soft-caps or a function of one's own.
        gated, bias, interleaved, transposed: see above.
        backend: the layer's own choice.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: a size that is not positive, or options that do not go together.
        UnknownBackend: no backend has this name.

    >>> layer = Experts(num_experts=4, hidden_size=6, intermediate_size=3)
    >>> ids, weights = torch.tensor([[0, 2], [3, 1]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    >>> layer(torch.ones(2, 6), ids, weights, backend="eager").shape
    torch.Size([2, 6])
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        E, H, I = num_experts, hidden_size, intermediate_size
        if min(E, H, I) < 1:
            raise InvalidInput(f"an experts layer needs positive sizes, got E = {E}, H = {H}, I = {I}")
        self.num_experts, self.hidden_size, self.intermediate_size = E, H, I
        self.activation = Activation(activation) if isinstance(activation, str) else activation
        self.gated, self.interleaved, self.transposed = gated, interleaved, transposed
        self.backend = backend

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        rows = 2 * I if gated else I
        self._up_name = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(self._up_name, parameter(E, H, rows) if transposed else parameter(E, rows, H))
        self.down_proj = parameter(E, I, H) if transposed else parameter(E, H, I)
        self.register_parameter(f"{self._up_name}_bias", parameter(E, rows) if bias else None)
        self.register_parameter("down_proj_bias", parameter(E, H) if bias else None)
        self.weights()  # says which options do not go together
        self.reset_parameters()

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        self._backend = ExpertsInterface[name].name

    def weights(self) -> ExpertWeights:
        """The layer as `experts_forward` and backends see it; its tensors as they are now."""
        # read by attribute, so that parametrized ones (LoRA) are computed, by every call anew
        up = Weight(getattr(self, self._up_name), getattr(self, f"{self._up_name}_bias"), transposed=self.transposed)
        down = Weight(self.down_proj, self.down_proj_bias, transposed=self.transposed)
        return ExpertWeights(up, down, self.activation, gated=self.gated, interleaved=self.interleaved)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, backend: str | None = None
    ) -> Tensor:
        """Run the chosen experts of each token and add their results, weighted.

        Args:
            hidden_states: (…, H), in the dtype of the parameters; inside autocast any float dtype.
            top_k_index: (…, K) int32 or int64, leading sizes as in hidden_states; -1 and E mean "no
                expert here".
            top_k_weights: (…, K), any float dtype.
            backend: for this call; None: the layer's own choice.

        Returns:
            (…, H) in the dtype of hidden_states.

        Raises:
            InvalidInput, UnknownBackend, BackendUnavailable, BackendRefused: see `experts_forward`.
        """
        out = experts_forward(
            self.weights(),
            *_flat(hidden_states, top_k_index, top_k_weights),
            backend=self.backend if backend is None else backend,
        )
        return out.reshape(hidden_states.shape)

    def explain(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Explanation:
        """Which backend would run this call, and why every other one would not."""
        weights = self.weights()
        call = describe_call(weights, *_flat(hidden_states, top_k_index, top_k_weights))
        return ExpertsInterface.explain(weights, call, self.backend)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's matrices and biases as nn.Linear does, from U(-1/√n, 1/√n) for n inputs."""
        for name, num_inputs in ((self._up_name, self.hidden_size), ("down_proj", self.intermediate_size)):
            bound = 1 / math.sqrt(num_inputs)
            for tensor in (getattr(self, name), getattr(self, f"{name}_bias")):
                if tensor is not None:
                    tensor.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        a = self.activation
        parts = [f"num_experts={self.num_experts}, hidden_size={self.hidden_size}"]
        parts += [f"intermediate_size={self.intermediate_size}", f"activation={a.kind if a.plain else a}"]
        parts += ["gated=False"] if not self.gated else []
        parts += ["bias=True"] if self.down_proj_bias is not None else []
        parts += [f"{name}=True" for name in ("interleaved", "transposed") if getattr(self, name)]
        return ", ".join([*parts, f"backend={self.backend!r}"])


def _flat(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three with their leading sizes in one, T."""
    tensors = (hidden_states, top_k_index, top_k_weights)
    leading = hidden_states.shape[:-1]
    if not all(tensor.dim() and tensor.shape[:-1] == leading for tensor in tensors):
        raise InvalidInput(
            "top_k_index and top_k_weights must both have shape (…, K) with the leading sizes of hidden_states (…, H),"
            f" got {tuple(top_k_index.shape)}, {tuple(top_k_weights.shape)} and {tuple(hidden_states.shape)}"
        )
    x_TH, index_TK, weights_TK = (torch.atleast_2d(tensor).flatten(0, -2) for tensor in tensors)
    return x_TH, index_TK, weights_TK
