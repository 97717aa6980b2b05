"""What a training run leaves to read: the model card, with samples, and the loss curve."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import set_seed

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
language: en
---

# A tiny Mixture-of-Experts model

A byte-level Qwen3-MoE of {parameters:.2f} M parameters: {layers} layers, {experts} experts a layer of which each byte
visits {top_k}. It was trained from nothing to show and test the experts backends of moetor, and writes what looks like
Python documentation. It knows nothing: what it says is not true.

- **Data**: docstrings and comments of the standard library of Python {python} and of its tests, and the help topics of
  `pydoc`, {train_mb:.2f} MB after removing repeated paragraphs. That text is under the PSF License Agreement,
  (c) Python Software Foundation.
- **Loss**: {heldout:.4f} nats per byte on {heldout_kb:.0f} kB of docstrings and topics that were held out (blocks at
  places
  drawn with a fixed seed; no paragraph of 40 bytes or more is in both parts), each byte predicted from at most
  {seq_length} before it; {train:.4f} on the training text (mean of the last 100 steps).
- **Training**: {steps} steps of {batch_size} x {seq_length} bytes in {minutes:.0f} minutes, float32, {device},
  torch {torch} (threads: {threads}), experts by moetor's backend `{experts_implementation}`. AdamW, learning rate {lr},
  5 % warm-up, then a cosine to 0. `training.json` has the loss along the way.
- **Command**: `{command}`
- **Tokenizer**: token id = byte value; 256 ends a text. Contexts longer than {seq_length} bytes were not trained.

## Samples

Three prompts (in bold), temperature 0.7, seeds 0, 1 and 2; the first text of each, not a choice.
"""
PROMPTS = ("Return the ", "The ", "If ")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training run; losses are nats per byte, `options` what the command line chose."""

    command: str
    minutes: float
    train_bytes: int
    heldout_bytes: int
    heldout_loss: float
    losses: list[float]
    options: dict[str, Any]


def samples(model: Any, tokenizer: Any) -> str:
    """A Markdown section: the first text for each of PROMPTS."""
    parts = []
    for seed, prompt in enumerate(PROMPTS):
        set_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        ids = model.generate(**inputs, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=240)[0]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        parts.append(f"\n**{prompt.strip()}** (seed {seed})\n\n```text\n{text}\n```\n")
    return "".join(parts)


def write_losses(path: Path, run: Run) -> None:
    """The options, the held-out loss and the mean loss of each 100 steps (of what is left, in the end) as JSON."""
    means = [round(part.mean().item(), 4) for part in torch.tensor(run.losses).split(100)]
    record = run.options | {"heldout_loss": run.heldout_loss, "mean_losses_of_100_steps": means}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_card(path: Path, run: Run, model: Any, tokenizer: Any) -> None:
    """Fill CARD from what was run and what it gave."""
    last = run.losses[-100:]
    card = CARD.format(
        **run.options,
        parameters=model.num_parameters() / 1e6,
        layers=model.config.num_hidden_layers,
        experts=model.config.num_experts,
        top_k=model.config.num_experts_per_tok,
        python=platform.python_version(),
        train_mb=run.train_bytes / 1e6,
        heldout=run.heldout_loss,
        heldout_kb=run.heldout_bytes / 1e3,
        train=sum(last) / len(last),
        minutes=run.minutes,
        device=model.device.type.upper(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        command=run.command,
    )
    path.write_text(card + samples(model, tokenizer), encoding="utf-8")


def plot(losses: list[float], path: Path) -> None:
    """The loss curve, where matplotlib is installed (`pip install 'moetor[plots]'`)."""
    try:
        from matplotlib import pyplot
    except ImportError:
        typer.echo("no loss curve: needs matplotlib; pip install 'moetor[plots]'", err=True)
        return
    pyplot.figure(figsize=(7, 4))
    pyplot.plot(torch.tensor(losses).unfold(0, min(50, len(losses)), 1).mean(-1))
    pyplot.xlabel("step")
    pyplot.ylabel("nats per byte, mean of 50 steps")
    pyplot.savefig(path, dpi=120, bbox_inches="tight")
