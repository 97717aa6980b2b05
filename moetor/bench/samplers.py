"""Ways to time the calls of a cell once: from Python, in a CUDA graph, and compiled."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .cases import Draw
from .measure import Call, error_of, inferred, trained
from .peers import Bound

# "call": from Python. "graph": replay of a CUDA graph. The others: from Python, through torch.compile in that mode.
COMPILE_MODES = {"compile": "default"} | {
    mode: mode for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
}
MODES = ("call", "graph", *COMPILE_MODES)


class CallSampler:
    """Seconds of a call from Python: all draws back to back, from idle to idle, by the host's clock.

    So it is the larger of the host's and the device's time, plus the last call's tail over the
    number of draws: what a layer costs in a loop of layers.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self.calls, self._cuda = calls, device.type == "cuda"

    def __call__(self) -> float:
        self._wait()
        start = time.perf_counter()
        for call in self.calls:
            call()
        self._wait()
        return (time.perf_counter() - start) / len(self.calls)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class GraphSampler:
    """Seconds of a call inside a CUDA graph that holds one call of each draw, by device events."""

    def __init__(self, calls: Sequence[Call]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # what a library makes once per stream is made outside the graph
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._results = [call() for call in calls]

    def error(self, references: Sequence[Sequence[Tensor]]) -> float:
        """The largest relative error of what a replay writes, over NaN."""
        for tensor in (tensor for results in self._results for tensor in results):
            tensor.fill_(float("nan"))
        self._graph.replay()
        return max(error_of(r, expected) for r, expected in zip(self._results, references, strict=True))

    def __call__(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(self._results)


def calls_of(draws: Sequence[Draw], forwards: Sequence[Bound]) -> list[Call]:
    """Forward, or forward and backward, as the draws' cell says."""
    if not draws[0].cell.training:
        return [inferred(forward) for forward in forwards]
    return [trained(forward, draw) for forward, draw in zip(forwards, draws, strict=True)]


def compiled_calls(mode: str, draws: list[Draw], bound: list[Bound]) -> list[Call]:
    """The calls through torch.compile, one graph for all draws; compiled and recorded when this returns."""
    compiled = torch.compile(bound[0].fn, mode=COMPILE_MODES[mode], dynamic=False)
    for draw in draws:
        for tensor in draw.weights.tensors():
            # as parameters of a model are: a recorded graph reads them where they lie
            torch._dynamo.mark_static_address(tensor)
    calls = calls_of(draws, [Bound(compiled, one.arguments) for one in bound])
    for _ in range(3):  # compile, record, replay
        for call in calls:
            call()
    return calls
