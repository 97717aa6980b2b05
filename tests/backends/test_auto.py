"""What `auto` chooses: by a table of this machine, else by its defaults; and what it says of it."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import moetor
from moetor import Call, ExpertsInterface, experts_forward
from moetor.backends import auto, timings
from moetor.backends.timings import Entry, Kind
from moetor.core.interface import describe_call
from moetor.testing import Case, Inputs, make_inputs

TOKENS = [1, 8, 64]
# batched_mm up to about 8 tokens, eager beyond, fused nowhere
TIMES = {"batched_mm": [10.0, 20.0, 900.0], "eager": [30.0, 30.0, 30.0], "fused": [80.0, 80.0, 80.0]}
CASE = Case(tokens=8, frozen=frozenset({"x", "weights", "routing"}))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of timings."""
    monkeypatch.setenv("MOETOR_CACHE", str(tmp_path))
    timings.forget()
    yield tmp_path / "timings.json"
    monkeypatch.undo()
    timings.forget()


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(CASE)


def kind(inputs: Inputs, **changes: object) -> Kind:
    weights, case = inputs.weights, inputs.case
    sizes = weights.num_experts, case.top_k, weights.hidden_size, weights.intermediate_size
    return replace(Kind(timings.device_name(weights.device), "float32", "dense", sizes), **changes)  # type: ignore[arg-type]


def entry(of: Kind, **changes: object) -> Entry:
    return replace(Entry(of, timings.versions(), "2026-02-03T00:00", TOKENS, TIMES), **changes)  # type: ignore[arg-type]


def describe(inputs: Inputs, **changes: object) -> Call:
    call = describe_call(inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights)
    return replace(call, **changes)  # type: ignore[arg-type]


def chosen(inputs: Inputs, **changes: object) -> str:
    return ExpertsInterface.select(inputs.weights, describe(inputs, **changes), "auto").name


def test_fastest_at_this_t_by_the_table(file: Path, inputs: Inputs) -> None:
    assert chosen(inputs) == "fused"
    timings.save([entry(kind(inputs))])
    names = [chosen(inputs, num_tokens=T) for T in (1, 8, 9, 16, 64, 10**6)]
    assert names == ["batched_mm", "batched_mm", "batched_mm", "eager", "eager", "eager"]
    # the crossing of two straight lines: 20 · (T/8)^(log 45 / log 8) = 30
    crossing = 8 * (30 / 20) ** (torch.log(torch.tensor(8.0)) / torch.log(torch.tensor(45.0))).item()
    assert [chosen(inputs, num_tokens=int(crossing) + i) for i in (0, 1)] == ["batched_mm", "eager"]


def test_table_counts_for_its_own_kind_alone(file: Path, inputs: Inputs) -> None:
    timings.save([entry(kind(inputs))])
    others = {
        "dtype": {"dtype": torch.float64},
        "K": {"top_k": 3},
        "training": {"needs_grad": True},
    }
    assert {name: chosen(inputs, **change) for name, change in others.items()} == dict.fromkeys(others, "fused")
    assert chosen(make_inputs(replace(CASE, layout="transposed"))) == "fused"
    assert chosen(make_inputs(replace(CASE, experts=6))) == "fused"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert chosen(inputs) == "fused"
    torch.set_num_threads(threads)
    assert chosen(inputs) == "batched_mm"


def test_graphs_have_times_of_their_own(file: Path, inputs: Inputs) -> None:
    timings.save([entry(kind(inputs))])
    assert chosen(inputs, compiling=True) == "batched_mm"  # a call's, for want of better
    times = {"fused": [1.0] * 3, "eager": [2.0] * 3}
    timings.save([entry(kind(inputs, graph=True), times_us=times)])
    assert chosen(inputs, compiling=True) == "fused"
    assert chosen(inputs) == "batched_mm"


def test_fastest_that_cannot_run_is_passed_by(file: Path, inputs: Inputs) -> None:
    timings.save([entry(kind(inputs), times_us={"gone": [1.0] * 3, "batched_mm": [2.0] * 3, "grouped_mm": [3.0] * 3})])
    assert chosen(inputs) == "batched_mm"
    assert chosen(inputs, num_tokens=2**20, compiling=True) == "grouped_mm"  # batched_mm would gather too much
    listed = make_inputs(replace(CASE, layout="list"))
    assert chosen(listed) == "eager"


def test_explain_says_what_it_goes_by(file: Path, inputs: Inputs) -> None:
    call = describe(inputs)
    assert "auto: by moetor's defaults; `moetor tune`" in str(ExpertsInterface.explain(inputs.weights, call))
    timings.save([entry(kind(inputs))])
    explanation = ExpertsInterface.explain(inputs.weights, call)
    words = "by what `moetor tune` measured on 2026-02-03: batched_mm 20 µs, eager 30 µs, fused 80 µs"
    assert explanation.how["auto"] == words
    assert explanation.as_dict()["how"]["auto"] == words
    far = ExpertsInterface.explain(inputs.weights, replace(call, num_tokens=100))
    assert far.how["auto"].endswith("at 64 tokens")
    assert "auto" not in ExpertsInterface.explain(inputs.weights, call, "eager").how


Break = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_text("{"), "cannot be read"),
        (lambda file: file.write_text("[]"), "cannot be read"),
        (lambda file: file.write_text('{"schema": 2}'), "schema 2"),
        (lambda file: file.write_text(file.read_text().replace('"tokens"', '"count"')), "cannot be read"),
        (lambda file: file.write_text(file.read_text().replace("80.0", "null, 80.0")), "each backend needs a time"),
        (lambda file: file.write_text(file.read_text().replace(torch.__version__, "1.0")), "measured with moetor"),
    ],
)
def test_damaged_or_stale_table_is_ignored_with_one_warning(
    file: Path, inputs: Inputs, damage: Break, words: str
) -> None:
    timings.save([entry(kind(inputs))])
    damage(file)
    timings.forget()
    with pytest.warns(UserWarning, match=words):
        assert chosen(inputs) == "fused"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(inputs) == "fused"
    # and is replaced by the next tuning
    timings.save([entry(kind(inputs))])
    assert chosen(inputs) == "batched_mm"


def test_entries_are_replaced_by_their_kind(file: Path, inputs: Inputs) -> None:
    timings.save([entry(kind(inputs)), entry(kind(inputs, training=True))])
    timings.save([entry(kind(inputs), tokens=[1], times_us={"fused": [1.0]})])
    assert len(json.loads(file.read_text())["entries"]) == 2
    assert chosen(inputs) == "fused"
    assert [path.name for path in file.parent.iterdir()] == ["timings.json"]


def test_result_is_the_chosen_backends(file: Path, inputs: Inputs) -> None:
    timings.save([entry(kind(inputs), times_us={"eager": [1.0] * 3})])
    call = inputs.weights, inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights
    assert torch.equal(experts_forward(*call), experts_forward(*call, backend="eager"))


@pytest.mark.parametrize("tuned", [False, True])
def test_one_graph_serves_every_t(file: Path, inputs: Inputs, tuned: bool) -> None:
    if tuned:
        timings.save([entry(kind(inputs))])
    ran: list[str] = []
    many = make_inputs(replace(CASE, tokens=100))
    weights = many.weights

    def forward(x: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return experts_forward(weights, x, ids, routing)

    def run(function, T: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
        arguments = [t[:T] for t in (many.hidden_states, many.top_k_index, many.top_k_weights)]
        ran.append(chosen(inputs, num_tokens=T, compiling=True))
        expected = experts_forward(weights, *arguments, backend="eager")
        torch.testing.assert_close(function(*arguments), expected)
        return expected

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    for T in (2, 5, 20, 70, 100):
        run(compiled, T)
    # the first T as it is, and all the others; a guard on T would make more where the table changes its mind
    assert counters["stats"]["unique_graphs"] == 2
    assert len(set(ran)) == (2 if tuned else 1)
    torch.compiler.reset()


def test_few_pairs_on_a_gpu_do_not_ask_while_t_is_symbolic(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "FIRST_ON_CUDA", ())
    few = describe(inputs, device=torch.device("cuda"), num_tokens=1)
    assert auto.choose(inputs.weights, few).name == "batched_mm"
    assert auto.choose(inputs.weights, replace(few, compiling=True)).name == "batched_mm"
    monkeypatch.setattr("torch.fx.experimental.symbolic_shapes.has_static_value", lambda size: False)
    assert auto.choose(inputs.weights, replace(few, compiling=True)).name == "grouped_mm"


def test_versions_are_those_that_run() -> None:
    assert timings.versions()["moetor"] == moetor.__version__
    assert timings.versions()["torch"] == torch.__version__
