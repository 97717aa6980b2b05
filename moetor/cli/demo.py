"""`moetor demo`: the tiny model that ships with moetor writes the same text on every backend of this machine."""

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..core.errors import BackendRefused
from ..core.interface import ExpertsInterface
from .generate import parse_device
from .record import record_backends
from .terminal import err, errors_in_one_line, fail, out

TINY = Path(__file__).parents[1] / "assets" / "tiny"
PROMPT = "Return a list of the "
PREFILL_TOKENS = 256
# Parameters below which threads gain nothing, and lose much on a busy machine: with one of two cores taken, one thread
# wrote 283 tokens/s, two threads 31.
SMALL = 10**7
SEED, SAMPLING = 0, {"do_sample": True, "temperature": 0.7}


@dataclass(frozen=True, slots=True)
class Run:
    """What one backend wrote, and how fast.

    Attributes:
        ran: the backends that really ran: a policy's choices, and what the decode phase switched to.
        greedy, sampled: token ids after the prompt.
        prefill_per_s: tokens per second of one forward of PREFILL_TOKENS tokens, the median of five.
        decode_per_s: tokens per second of the greedy text, its first token not counted.
    """

    ran: tuple[str, ...]
    greedy: list[int]
    sampled: list[int]
    prefill_per_s: float
    decode_per_s: float


def run(
    model: Annotated[Path, typer.Option(help="Another checkpoint folder.", show_default="the tiny one shipped")] = TINY,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of each text.")] = 160,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda …", show_default="the first accelerator, else cpu")
    ] = None,
) -> None:
    """Write text with a small MoE model on every backend this machine can run, and compare speed and results.

    Needs no network. Exits with 1 if, in float32, two backends write different greedy text.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with errors_in_one_line():
        place = parse_device(device)

    from transformers.utils.logging import disable_progress_bar

    from .models import encode, load

    disable_progress_bar()
    loaded, tokenizer = load(str(model.resolve()), "eager", torch.float32, place)
    ids = encode(tokenizer, prompt, place)
    if override := os.environ.get("MOETOR_EXPERTS"):
        err.print(f"MOETOR_EXPERTS={override} overrides every choice: all rows below ran it", style="yellow")
    if loaded.num_parameters() < SMALL:
        torch.set_num_threads(1)

    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    # eager first: the others are compared with it
    for name in sorted(ExpertsInterface.names(), key=lambda name: name != "eager"):
        if reason := ExpertsInterface[name].machine_why_not(place):
            skipped[name] = reason
            continue
        with err.status(f"writing with {name}"), errors_in_one_line():
            try:
                runs[name] = measure(loaded, tokenizer, ids, name, max_new_tokens)
            except BackendRefused as error:  # no float32, say
                skipped[name] = str(error)
    if "eager" not in runs:
        raise fail(skipped["eager"])
    _print_texts(runs, prompt, tokenizer)
    out.print(_table(runs, skipped, place))
    if different := [name for name, result in runs.items() if result.greedy != runs["eager"].greedy]:
        raise fail(f"greedy text in float32 differs from eager's on: {', '.join(different)}")


def measure(model: Any, tokenizer: Any, ids: torch.Tensor, name: str, num_tokens: int) -> Run:
    """Write twice, greedily and sampled, and time it."""
    from .models import Clock, padding_id

    model.set_experts_implementation(name)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": padding_id(tokenizer),
        "max_new_tokens": num_tokens,
    }
    model.generate(ids, **options | {"max_new_tokens": 2})  # what only the first call pays
    clock = Clock()
    with record_backends() as ran:
        greedy = model.generate(ids, do_sample=False, streamer=clock, **options)
        torch.manual_seed(SEED)
        sampled = model.generate(ids, **SAMPLING, **options)
    start = ids.shape[1]
    return Run(
        tuple(ran),
        greedy[0, start:].tolist(),
        sampled[0, start:].tolist(),
        _prefill_per_s(model, ids),
        clock.tokens_per_s,
    )


def _prefill_per_s(model: Any, ids: torch.Tensor) -> float:
    long = ids.repeat(1, -(-PREFILL_TOKENS // ids.shape[1]))[:, :PREFILL_TOKENS]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        with torch.no_grad():
            # .cpu() waits for a GPU
            model(long).logits[0, -1, 0].cpu()
        times.append(time.perf_counter() - start)
    return PREFILL_TOKENS / statistics.median(times)


def _print_texts(runs: dict[str, Run], prompt: str, tokenizer: Any) -> None:
    """Each text once, under the names of all backends that wrote it."""
    for kind in ("greedy", "sampled"):
        writers: dict[tuple[int, ...], list[str]] = {}
        for name, result in runs.items():
            writers.setdefault(tuple(getattr(result, kind)), []).append(name)
        for ids, names in writers.items():
            text = Text.assemble((prompt, "bold"), tokenizer.decode(list(ids), skip_special_tokens=True))
            title = f"{kind}, by {', '.join(names)}"
            out.print(Panel(text, title=title, title_align="left", width=min(out.width, 100)))


def _table(runs: dict[str, Run], skipped: dict[str, str], device: torch.device) -> Table:
    table = Table(title=f"float32 on {device}; token ids compared with eager's", title_justify="left")
    table.add_column("backend", no_wrap=True)
    for column in ("prefill\ntokens/s", "decode\ntokens/s"):
        table.add_column(column, justify="right")
    table.add_column("greedy ids\nthe same")
    table.add_column("sampled ids\nthe same")
    for name, result in runs.items():
        agreements = [
            _agreement(result.greedy, runs["eager"].greedy),
            _agreement(result.sampled, runs["eager"].sampled),
        ]
        label = name if result.ran == (name,) else f"{name} → {', '.join(result.ran)}"
        table.add_row(label, f"{result.prefill_per_s:.0f}", f"{result.decode_per_s:.1f}", *agreements)
    for name, reason in skipped.items():
        table.add_row(name, "-", "-", Text(f"skipped: {reason}", style="dim"), "")
    return table


def _agreement(ids: list[int], expected: list[int]) -> Text:
    if ids == expected:
        return Text("yes", style="green")
    same = next(
        (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected))
    )
    return Text(f"no, from token {same + 1} on", style="bold red")
