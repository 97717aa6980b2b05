"""torch.compile and torch.export: our operators in graphs, and what a graph must not hide."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moetor import ExpertsInterface, ExpertWeights, Weight, experts_forward
from moetor.core.errors import BackendRefused, InvalidInput
from moetor.core.interface import Backend
from moetor.debug import check_routing
from moetor.testing import Case, make_inputs
from moetor.testing.cases import EVERYTHING


class Layer(nn.Module):
    def __init__(self, weights: ExpertWeights, backend: str) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(tensor.detach().clone()) for tensor in weights.tensors())
        self.backend = backend

    def forward(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return experts_forward(ExpertWeights(Weight(self.up), Weight(self.down)), x, ids, routing, self.backend)


def layer_and_arguments(backend: str, **case: object) -> tuple[Layer, tuple[Tensor, Tensor, Tensor]]:
    inputs = make_inputs(Case(frozen=EVERYTHING, **case), "cpu")  # type: ignore[arg-type]
    arguments = (inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    return Layer(inputs.weights, backend), arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "fused"])
def test_an_exported_layer_runs_at_other_sizes_and_gives_what_it_gave(backend: str, dtype: torch.dtype) -> None:
    layer, arguments = layer_and_arguments(backend, dtype=dtype)
    tokens = torch.export.Dim("tokens", max=1000)
    with torch.no_grad():
        program = torch.export.export(layer, arguments, dynamic_shapes=({0: tokens},) * 3).module()
        for count in (19, 5, 1, 0):
            part = tuple(tensor[:count] for tensor in arguments)
            assert torch.equal(program(*part), layer(*part))


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm"])
def test_an_exported_layer_trains(backend: str) -> None:
    layer, arguments = layer_and_arguments(backend)
    tokens = torch.export.Dim("tokens", max=1000)
    program = torch.export.export(layer, arguments, dynamic_shapes=({0: tokens},) * 3).module()
    for module in (layer, program):
        module(*arguments).square().sum().backward()
    gradients = dict(program.named_parameters())
    for name, parameter in layer.named_parameters():
        assert torch.equal(gradients[name].grad, parameter.grad)


def test_an_exported_layer_whose_gradient_would_be_missing_says_so() -> None:
    layer, arguments = layer_and_arguments("fused")
    result = torch.export.export(layer, arguments).module()(*arguments)
    with pytest.raises(BackendRefused, match="fused_experts_cpu has no gradient"):
        result.sum().backward()


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "auto"])
def test_meta_tensors_go_through(backend: str) -> None:
    layer, arguments = layer_and_arguments(backend)
    result = layer.to("meta")(*(tensor.to("meta") for tensor in arguments))
    assert result.device.type == "meta"
    assert result.shape == arguments[0].shape


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "fused", "auto"])
def test_fake_tensors_go_through(backend: str, training: bool) -> None:
    with FakeTensorMode(), torch.set_grad_enabled(training):
        layer, arguments = layer_and_arguments(backend)
        result = layer(*arguments)
        assert result.shape == arguments[0].shape
        if training:
            result.sum().backward()
            assert layer.up.grad is not None
            assert layer.up.grad.shape == layer.up.shape


def test_eager_refuses_tensors_without_values_in_its_own_words() -> None:
    layer, arguments = layer_and_arguments("eager")
    with pytest.raises(BackendRefused, match="tensors without values"):
        layer.to("meta")(*(tensor.to("meta") for tensor in arguments))


@pytest.mark.parametrize("backend", ["grouped_mm", "batched_mm", "fused"])
def test_a_compiled_layer_checks_ids_where_it_is_asked_to(backend: str) -> None:
    torch._dynamo.reset()
    layer, (x, ids, routing) = layer_and_arguments(backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wrong = ids.clone()
    wrong[3, 1] = 77
    with torch.no_grad():
        expected = layer(x, ids, routing)
        assert compiled(x, wrong, routing).isfinite().all()
        with check_routing():
            assert torch.equal(compiled(x, ids, routing), expected)
            with pytest.raises(InvalidInput, match="got 77 at token 3, slot 1"):
                compiled(x, wrong, routing)
        assert compiled(x, wrong, routing).isfinite().all()


def test_another_backend_is_another_graph() -> None:
    torch._dynamo.reset()

    def doubled(weights: ExpertWeights, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return 2 * ExpertsInterface["batched_mm"].forward(weights, x, ids, routing)

    ExpertsInterface.register("doubled", Backend("doubled", doubled))
    try:
        layer, arguments = layer_and_arguments("grouped_mm")
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            expected = layer(*arguments)
            for backend, factor in (("grouped_mm", 1), ("doubled", 2), ("fused", 1), ("doubled", 2), ("batched_mm", 1)):
                layer.backend = backend
                torch.testing.assert_close(compiled(*arguments), factor * expected)
    finally:
        ExpertsInterface.unregister("doubled")


def test_loops_stay_out_of_cuda_graphs() -> None:
    for name in ("grouped_matmul", "grouped_matmul_weight_gradient", "quantized_product"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.moetor, f"{name}_loop").default.tags
        assert torch.Tag.cudagraph_unsafe not in getattr(torch.ops.moetor, name).default.tags
