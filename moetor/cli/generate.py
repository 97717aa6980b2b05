"""`moetor generate`: text from any local checkpoint folder or hub id, with the experts backend of one's choice."""

from typing import Annotated

import torch
import typer

from ..core.errors import InvalidInput
from .machine import default_device
from .record import record_backends
from .terminal import err, errors_in_one_line

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def run(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or the id of a model on the Hugging Face hub.")],
    prompt: Annotated[str, typer.Argument(help="What the text begins with.")],
    experts_implementation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The experts backend; or, repeated, KEY=NAME for each sub-config: text_config=grouped_mm.",
            show_default="auto",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 128,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample; without it, the likeliest token each time.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Sample at this temperature; implies --sample.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES), help="auto: as the checkpoint says.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 …", show_default="the first accelerator, else cpu")
    ] = None,
) -> None:
    """Write text with a model: the text on stdout as it comes; speed and the backends that ran on stderr."""
    with errors_in_one_line():
        choice = parse_choice(experts_implementation or ["auto"])
        chosen_dtype = parse_dtype(dtype)
        chosen_device = parse_device(device)

    from transformers import TextStreamer

    from .models import Clock, encode, load, padding_id

    loaded, tokenizer = load(model, choice, chosen_dtype, chosen_device)
    ids = encode(tokenizer, prompt, chosen_device)
    clock = Clock(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    sampling = {"temperature": temperature or 1.0} if sample or temperature else {}
    torch.manual_seed(seed)
    with record_backends() as ran, errors_in_one_line(torch.OutOfMemoryError):
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=bool(sampling),
            pad_token_id=padding_id(tokenizer),
            streamer=clock,
            **sampling,
        )
    speed = f" at {clock.tokens_per_s:.1f}/s" if clock.num_tokens > 1 else ""
    err.print(
        f"{ids.shape[1]} tokens read at {ids.shape[1] / clock.prefill_s:.1f}/s, {clock.num_tokens} written{speed}"
        f" on {chosen_device} in {str(loaded.dtype).removeprefix('torch.')}; experts: {describe_ran(ran)}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def parse_choice(words: list[str]) -> str | dict[str, str]:
    """One name, or KEY=NAME for each sub-config.

    >>> parse_choice(["eager"]), parse_choice(["text_config=grouped_mm", "=eager"])
    ('eager', {'text_config': 'grouped_mm', '': 'eager'})
    """
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    if plain := [word for word in words if "=" not in word]:
        raise InvalidInput(
            f"several --experts-implementation options must all be KEY=NAME, got {plain[0]!r};"
            f" '={plain[0]}' is for everything not named otherwise"
        )
    return dict(word.split("=", 1) for word in words)


def parse_dtype(name: str) -> torch.dtype | str:
    if name not in DTYPES:
        raise InvalidInput(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return name if name == "auto" else getattr(torch, name)


def parse_device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise InvalidInput(f"--device needs a device of this machine, got {name!r}: {error}") from error
    return device


def describe_ran(ran: dict[str, int]) -> str:
    """Backends with their numbers of calls, most first.

    >>> describe_ran({"eager": 3, "grouped_mm": 40})
    'grouped_mm (40 calls), eager (3 calls)'
    """
    ordered = sorted(ran.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} ({count} calls)" for name, count in ordered) or "none ran"
