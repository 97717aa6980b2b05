"""A Mixture-of-Experts language model of one's own: written, trained and exported with torch and moetor alone.

python examples/own_model.py --out own-model.pt2
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import moetor

# it reads and writes bytes, at most so many at a time
VOCABULARY, CONTEXT = 256, 128
HIDDEN, HEADS, LAYERS = 64, 4, 2
EXPERTS, TOP_K, INTERMEDIATE = 8, 2, 64
# keeps all experts in use: without it a few take every token
BALANCE_WEIGHT = 0.01


class Layer(nn.Module):
    """Causal attention, then the experts, each beside the stream (batch, tokens, HIDDEN)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.experts_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = moetor.nn.MoE(
            moetor.nn.SoftmaxTopKRouter(HIDDEN, EXPERTS, TOP_K, normalize=True),
            moetor.nn.Experts(EXPERTS, HIDDEN, INTERMEDIATE),
            shared_experts=moetor.nn.MLP(HIDDEN, INTERMEDIATE),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, moetor.nn.Routing]:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y, routing = self.moe(self.experts_norm(x), return_routing=True)
        return x + y, routing


class Model(nn.Module):
    """ids (batch, tokens) to logits (batch, tokens, VOCABULARY) and a loss that keeps all experts in use."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        balance = x.new_zeros(())
        for layer in self.layers:
            x, routing = layer(x)
            balance = balance + moetor.nn.load_balancing_loss(routing.logits, routing.top_k_index)
        return self.head(self.norm(x)), balance


def load_ids() -> Tensor:
    """(bytes,) the help topics of Python, half a megabyte of English."""
    return torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def train(model: Model, ids: Tensor, steps: int, batch_size: int = 8) -> list[float]:
    """Train in place; the loss of each step in nats per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (batch_size, 1))
        batch = ids[starts + torch.arange(CONTEXT + 1)]
        logits, balance = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss + BALANCE_WEIGHT * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            typer.echo(f"step {step}: {losses[-1]:.2f} nats per byte")
    return losses


def export(model: Model, path: Path) -> None:
    """One file that runs without this one, for one text of any number of tokens up to CONTEXT.

    What is exported is for inference: products of experts are operators there, without a gradient.
    """
    model.eval().requires_grad_(False)
    shapes = {"ids": {1: torch.export.Dim("tokens", max=CONTEXT)}}
    example = torch.zeros(1, CONTEXT // 2, dtype=torch.int64)
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=shapes), path)


def write(program: nn.Module, prompt: str, num_bytes: int) -> str:
    """Continue a prompt by an exported program; `import moetor` is all that it needs besides torch."""
    ids = list(prompt.encode())
    for _ in range(num_bytes):
        logits, _ = program(torch.tensor([ids[-CONTEXT:]]))
        ids.append(int(torch.multinomial((logits[0, -1] / 0.7).softmax(-1), 1)))
    return bytes(ids).decode(errors="replace")


def main(
    out: Annotated[Path, typer.Option(help="File for the exported program.")] = Path("own-model.pt2"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400,
) -> None:
    """Train the model on Python's help topics, export it, and let what was exported write."""
    torch.manual_seed(0)
    model = Model()
    train(model, load_ids(), steps)
    export(model, out)
    typer.echo(write(torch.export.load(out).module(), "The statement ", 200))


if __name__ == "__main__":
    typer.run(main)
