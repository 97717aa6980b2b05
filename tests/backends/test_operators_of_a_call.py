"""How many operators a call of few tokens runs: on a GPU each costs the host more than its work takes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moetor import experts_forward
from moetor.testing import Case, make_inputs

# Nothing of these runs on the device: they make views, or memory that nobody fills.
FREE = {
    *("view", "reshape", "_unsafe_view", "expand", "as_strided", "detach", "alias", "unsqueeze", "squeeze"),
    *("slice", "select", "split", "split_with_sizes", "unbind", "transpose", "t"),
    *("empty", "empty_like", "new_empty"),
}


class Counting(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# One product of experts is one operator here; eager runs four an expert. With fp32 routing weights one
# more rounds the sum. transformers' grouped_mm needs 16, its batched_mm 9 and cannot leave out ids.
@pytest.mark.parametrize(("routing", "more"), [(torch.bfloat16, 0), (torch.float32, 1)], ids=str)
@pytest.mark.parametrize(
    ("backend", "tokens", "bound"),
    [("grouped_mm", 1, 14), ("grouped_mm", 2, 16), ("batched_mm", 1, 11), ("batched_mm", 2, 12), ("eager", 1, 19)],
)
def test_operators_of_a_call_stay_few(backend: str, tokens: int, bound: int, routing: torch.dtype, more: int) -> None:
    inputs = make_inputs(Case(tokens=tokens, experts=8, top_k=2, dtype=torch.bfloat16))
    arguments = inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights.to(routing)
    with torch.no_grad():
        experts_forward(*arguments, backend=backend)
        with Counting() as counting:
            experts_forward(*arguments, backend=backend)
    ran = counting.ran - Counter({name: counting.ran[name] for name in FREE})
    assert ran.total() <= bound + more, dict(ran)
