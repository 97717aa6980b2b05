"""Train the tiny byte-level Qwen3-MoE that ships in moetor/assets/tiny, in less than an hour on one CPU core.

python examples/train_tiny.py --out my-tiny-model
"""

import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tiny_card import Run, plot, write_card, write_losses
from tiny_text import END_BYTE, END_ID, build_tokenizer, load_text
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import Qwen3MoeConfig

from moetor import AutoModelForCausalLM

# keeps all experts in use: without it a few take every token
BALANCE_WEIGHT = 0.01


def build_model(experts_implementation: str = "grouped_mm", seed: int = 0) -> Any:
    """A new model; `seed` alone decides its weights, whatever runs its experts."""
    config = Qwen3MoeConfig(
        vocab_size=END_ID + 1,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=88,  # 96 would make float32 weights of more than 4 MiB
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.05,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, experts_implementation=experts_implementation)


def to_ids(text: bytes) -> Tensor:
    """(len(text),) int64: bytes as the tokenizer numbers them, END_BYTE as the end of a text."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return ids.masked_fill(ids == END_BYTE, END_ID)


def train(
    model: Any,
    train_bytes: bytes,
    steps: int,
    *,
    batch_size: int = 8,
    seq_length: int = 256,
    lr: float = 2e-3,
    seed: int = 0,
    on_step: Callable[[float], object] = lambda loss: None,
) -> list[float]:
    """Train in place.

    `seed` alone decides the batches, so models that differ in their experts backend see the same bytes.

    Returns:
        The loss of each step in nats per byte, without the term that balances the experts; `on_step` gets it at once.
    """
    ids = to_ids(train_bytes)
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    decay = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}
    no_decay = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decay, no_decay], lr=lr, betas=(0.9, 0.98))
    warmup = 1 + steps // 20

    def share_of_lr(step: int) -> float:
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
    losses = []
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - seq_length, (batch_size, 1), generator=generator)
        batch = ids[starts + torch.arange(seq_length + 1)].to(model.device)
        output = model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss + BALANCE_WEIGHT * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        on_step(losses[-1])
    return losses


@torch.no_grad()
def heldout_loss(model: Any, heldout: bytes, seq_length: int = 256) -> float:
    """Mean nats per byte, each byte predicted from the seq_length / 2 to seq_length bytes before it."""
    model.eval()
    ids = torch.cat([torch.tensor([END_ID]), to_ids(heldout)]).to(model.device)
    half = seq_length // 2
    total = 0.0
    for start in range(0, len(heldout), half):
        first = max(0, start - half)
        window = ids[first : start + half + 1]
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits[start - first :], window[start - first + 1 :], reduction="sum").item()
    return total / len(heldout)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the model, its card and its losses.")] = Path("tiny-model"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 13500,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 8,
    seq_length: Annotated[int, typer.Option(min=2, max=512, help="Bytes in a sequence.")] = 256,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Decides the first weights and the batches.")] = 0,
    experts_implementation: Annotated[
        str, typer.Option(help="The experts backend, by its name in moetor.")
    ] = "grouped_mm",
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
) -> None:
    """Train the tiny model on the documentation of this Python's standard library."""
    options: dict[str, Any] = {"batch_size": batch_size, "seq_length": seq_length, "lr": lr, "seed": seed}
    train_bytes, heldout = load_text()
    model = build_model(experts_implementation, seed).to(device)
    start = time.perf_counter()
    with tqdm(total=steps * batch_size * seq_length, unit="B", unit_scale=True, mininterval=1) as bar:

        def on_step(loss: float) -> None:
            bar.set_postfix_str(f"{loss:.3f} nats/byte", refresh=False)
            bar.update(batch_size * seq_length)

        losses = train(model, train_bytes, steps, on_step=on_step, **options)
    run = Run(
        command=shlex.join(["python", *sys.argv]),
        minutes=(time.perf_counter() - start) / 60,
        train_bytes=len(train_bytes),
        heldout_bytes=len(heldout),
        heldout_loss=heldout_loss(model, heldout, seq_length),
        losses=losses,
        options={"steps": steps, **options, "experts_implementation": experts_implementation},
    )
    tokenizer = build_tokenizer()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_losses(out / "training.json", run)
    write_card(out / "README.md", run, model, tokenizer)
    plot(losses, out / "loss.png")
    typer.echo(f"{run.heldout_loss:.4f} nats per byte on {len(heldout)} held-out bytes; everything is in {out}")


if __name__ == "__main__":
    typer.run(main)
