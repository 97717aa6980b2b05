"""What a run promises: no time for a wrong result, nothing lost, and an end."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from moetor import Backend, ExpertsInterface
from moetor.bench.cases import Cell, Draw
from moetor.bench.page import page
from moetor.bench.peers import Bound, Candidate, candidates
from moetor.bench.report import Report
from moetor.bench.roofs import Roofs
from moetor.bench.run import Settings, run
from moetor.bench.shapes import Shape

CPU = torch.device("cpu")
TINY = Shape("tiny", "none", 4, 2, 32, 16)
GPT_OSS = Shape("tiny-go", "none", 4, 2, 32, 32, "gpt_oss", bias=True, interleaved=True, transposed=True)


def cells(*tokens: int, shape: Shape = TINY) -> list[Cell]:
    return [Cell(shape, T, torch.float32) for T in tokens]


def settings(**changes: object) -> Settings:
    return Settings(CPU, cell_s=0.02, **changes)  # type: ignore[arg-type]


def report_of(cells: list[Cell], names: str | list[Candidate], with_settings: Settings | None = None) -> Report:
    report = Report("command", "commit", "date", {"device": "cpu"}, Roofs(1e10, 1e11, "float32"))
    chosen = candidates(names) if isinstance(names, str) else names
    assert list(run(cells, chosen, with_settings or settings(), report)) == report.cells
    return report


@pytest.fixture
def planted() -> Iterator[str]:
    """A backend that is right except for one token alone."""
    good = ExpertsInterface["eager"].forward

    def forward(weights, x, ids, routing):  # type: ignore[no-untyped-def]
        return good(weights, x, ids, routing) * (1.001 if len(x) == 1 else 1)

    ExpertsInterface.register("planted", Backend("planted", forward))
    yield "planted"
    ExpertsInterface.unregister("planted")


def stranger(name: str, call: Callable[[], torch.Tensor]) -> Candidate:
    return Candidate(name, lambda draw, mode: None, lambda draw: Bound(call, ()))


def test_wrong_result_gets_no_time(planted: str) -> None:
    at_one, at_three = report_of(cells(1, 3), f"{planted},eager").cells
    row = at_one.rows[0]
    assert (row.status, row.times) == ("wrong", {})
    assert row.error == pytest.approx(1e-3, rel=0.01)
    assert "off by" in (row.reason or "")
    assert at_one.rows[1].times
    assert at_three.rows[0].status == "ok"
    assert at_three.rows[0].times


def test_unwritten_result_is_wrong() -> None:
    (cell,) = report_of(cells(3), [stranger("writes nothing", lambda: torch.full((3, 32), torch.nan))]).cells
    row = cell.rows[0]
    assert (row.status, row.reason, row.error) == ("wrong", "the result has NaN or another shape", None)


@pytest.mark.parametrize("shape", [TINY, GPT_OSS], ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ours_and_transformers_run_on_the_same_tensors(shape: Shape, dtype: torch.dtype) -> None:
    (cell,) = report_of([Cell(shape, 5, dtype)], "eager,grouped_mm,transformers:eager,transformers:grouped_mm").cells
    assert [row.status for row in cell.rows] == ["ok"] * 4, cell.rows
    times = [row.times["call"] for row in cell.rows]
    assert all(time.q1_us <= time.median_us <= time.q3_us for time in times)


@pytest.mark.parametrize("shape", [TINY, GPT_OSS], ids=lambda shape: shape.name)
def test_training_checks_every_gradient(shape: Shape) -> None:
    names = "fused,eager,grouped_mm,batched_mm,transformers:eager,transformers:grouped_mm"
    (cell,) = report_of([Cell(shape, 5, torch.float32, training=True)], names).cells
    assert [row.status for row in cell.rows] == ["ok"] * 6, cell.rows
    forward = report_of([Cell(shape, 5, torch.float32)], names).cells[0]
    assert cell.flops == 3 * forward.flops


@pytest.mark.parametrize("leaf", range(4), ids=["x", "routing", "up", "down"])
def test_wrong_gradient_gets_no_time(leaf: int) -> None:
    good = candidates("eager")[0]

    def bind(draw: Draw) -> Bound:
        """The right result, with the gradient of one leaf 1 % too large."""
        wrong = draw.leaves()[leaf]

        def forward() -> torch.Tensor:
            out = good.bind(draw)()
            (slope,) = torch.autograd.grad(out, wrong, draw.upstream, retain_graph=True)
            extra = (wrong - wrong.detach()) * slope
            # adds nothing to the result, and a hundredth of the gradient
            return out + 0.01 * extra.sum() * draw.upstream / draw.upstream.square().sum()

        return Bound(forward, ())

    cells = [Cell(TINY, 5, torch.float32, training=True)]
    bad = Candidate("bad", good.why_not, bind)
    row = report_of(cells, [bad]).cells[0].rows[0]
    assert (row.status, row.times) == ("wrong", {})
    assert row.error == pytest.approx(0.01 / 2, rel=0.1)  # a gradient's error counts half


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "fp8_tensor_weights"])
def test_quantised_experts_are_checked_as_their_format_says(format: str) -> None:
    shape = Shape("tiny", "none", 4, 2, 64, 32)
    (cell,) = report_of([Cell(shape, 5, torch.bfloat16, format=format)], "eager,grouped_mm,transformers:eager").cells
    assert [row.status for row in cell.rows] == ["ok", "ok", "refused"], cell.rows
    assert cell.format == format
    assert format in cell.group


@pytest.mark.filterwarnings("ignore:.*lru_cache:UserWarning")  # of transformers' own code
def test_compiled_call_is_one_graph_for_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, mode, **more: original(fn, backend="eager", **more))
    counters.clear()
    names = "grouped_mm,transformers:grouped_mm"
    (cell,) = report_of([Cell(TINY, 5, torch.bfloat16)], names, settings(modes=("call", "compile"))).cells
    assert [sorted(row.times) for row in cell.rows] == [["call", "compile"]] * 2, cell.rows
    assert cell.draws == 2
    assert counters["stats"]["unique_graphs"] == 2  # one a candidate
    torch._dynamo.reset()


def test_what_is_wrong_in_one_mode_has_no_time_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fn, **options):  # type: ignore[no-untyped-def]
        return lambda *arguments: 2 * fn(*arguments)

    monkeypatch.setattr(torch, "compile", broken)
    (cell,) = report_of(cells(3), "eager", settings(modes=("call", "compile"))).cells
    assert (cell.rows[0].status, cell.rows[0].times) == ("wrong", {})
    assert cell.rows[0].reason == cell.rows[0].no_time["compile"]


def test_failure_is_a_row_with_its_reason() -> None:
    def no_memory() -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate too much")

    def broken() -> torch.Tensor:
        raise RuntimeError("broken\nin two lines")

    rows = report_of(cells(3), [stranger("a", no_memory), stranger("b", broken), *candidates("eager")]).cells[0].rows
    assert [row.status for row in rows] == ["out of memory", "failed", "ok"]
    assert rows[1].reason == "RuntimeError: broken in two lines"


def test_slow_first_call_is_given_up_for_the_shape() -> None:
    calls = []

    def slow() -> torch.Tensor:
        calls.append(1)
        try:
            time.sleep(20)
        except Exception:  # as a compiler that swallows what it does not know
            time.sleep(20)
        return torch.zeros(3, 32)

    report = report_of(cells(3, 4), [stranger("slow", slow)], settings(first_s=0.2))
    assert [cell.rows[0].status for cell in report.cells] == ["timed out"] * 2
    assert len(calls) == 1


def test_budget_stops_and_says_what_was_left() -> None:
    now = [0.0]

    def bind(draw: Draw) -> Bound:
        now[0] += 3.0  # two draws a cell: 6 s
        return candidates("eager")[0].bind(draw)

    slow = Candidate("slow", lambda draw, mode: None, bind)
    report = report_of(cells(1, 2, 3, 4), [slow], settings(budget_s=10.0, clock=lambda: now[0]))
    assert [cell.tokens for cell in report.cells] == [1, 2]
    assert report.cells[0].rows[0].times
    assert len(report.left_out) == 2
    assert all("budget" in line for line in report.left_out)
    assert report.left_out[0] in page(report)


def test_refusal_says_why() -> None:
    (cell,) = report_of(cells(1), "liger,sonicmoe").cells
    assert [(row.status, row.reason) for row in cell.rows] == [
        ("refused", "needs a CUDA device, got cpu"),
        ("refused", "needs an NVIDIA GPU, got cpu"),
    ]
    odd = Shape("odd", "none", 4, 2, 32, 16, bias=True)
    (cell,) = report_of(cells(1, shape=odd), "transformers:eager").cells
    assert cell.rows[0].status == "refused"


@pytest.mark.gpu
def test_graph_is_checked_and_timed() -> None:
    shape = Shape("small", "none", 8, 2, 256, 128)
    here = Settings(torch.device("cuda"), ("call", "graph"), cell_s=0.1)

    def bind(draw):  # type: ignore[no-untyped-def]
        right = candidates("grouped_mm")[0].bind(draw)
        return Bound(lambda: right() * 2 if torch.cuda.is_current_stream_capturing() else right(), ())

    # others' kernels compile for minutes
    names = [*candidates("ours,transformers"), Candidate("wrong in a graph", lambda draw, mode: None, bind)]
    report = report_of([Cell(shape, 8, torch.bfloat16)], names, here)
    rows = {row.candidate: row for row in report.cells[0].rows}
    for name in ("grouped_mm", "batched_mm", "transformers:grouped_mm"):
        assert sorted(rows[name].times) == ["call", "graph"], rows[name]
        assert rows[name].extra_bytes
    assert (rows["wrong in a graph"].status, rows["wrong in a graph"].times) == ("wrong", {})


@pytest.mark.gpu
def test_training_and_recorded_compilation_are_checked_and_timed() -> None:
    shape = Shape("small", "none", 8, 2, 256, 128)
    here = Settings(torch.device("cuda"), ("call", "graph", "compile", "reduce-overhead"), cell_s=0.1)
    cells = [Cell(shape, 8, torch.bfloat16, training=training) for training in (False, True)]
    for cell in report_of(cells, "grouped_mm", here).cells:
        for row in cell.rows:
            assert row.status == "ok", row
            assert {"call", "compile"} <= row.times.keys(), row
