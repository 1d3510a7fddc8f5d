"""A PyTorch model through tpukit: the loop you have, a fused step, optimised, saved and checked.

python examples/torch_integration.py [--steps 60] [--out runs/torch]
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as functional
from torch import nn

from tpukit.torch import KernelPyTorchConfig, TPUBackend, TPUOptimizer

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 256, 64, 4, 64, 16


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to what came before, then think."""
        b, s, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class NextByte(nn.Module):
    """A small GPT over bytes, with its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2048, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, S, 256) of the byte after each of `tokens` (B, S)."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    """The model, as `tpukit check --torch` asks for it."""
    return NextByte()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Tell the whole story once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/torch"))
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = [text[at : at + LENGTH + 1] for at in torch.randint(len(text) - LENGTH, (BATCH,))]
        both = torch.stack(rows)
        return both[:, :-1], both[:, 1:]

    config = KernelPyTorchConfig(mode="training")
    backend = TPUBackend(config)
    model = backend.prepare_model(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for _ in range(options.steps // 3):  # the loop you have
        tokens, targets = backend.prepare_data(batch())
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
    print(f"ordinary loop   step {options.steps // 3}, loss {loss.item():.3f}")

    step = backend.train_step(model, loss_of, optimizer)  # the same, as one program
    for _ in range(options.steps - options.steps // 3):
        loss = step(*batch())
    print(f"fused step      step {options.steps}, loss {loss.item():.3f}")

    for level in ("conservative", "balanced", "aggressive"):
        result = TPUOptimizer(config).optimize(model, batch()[0], optimization_level=level)
        print(f"{level:<15} differs by {result.numerical_error:.1e} — {' '.join(result.changes)}")

    options.out.mkdir(parents=True, exist_ok=True)
    saved = options.out / "next_byte.safetensors"
    backend.save_model(model, saved, save_optimizer=True, optimizer=optimizer)
    twin = backend.load_model(build(), saved)
    tokens, targets = batch()
    with torch.no_grad():
        same = torch.equal(model(tokens), twin(tokens))
    print(f"saved, loaded   {saved}: {'the same outputs' if same else 'OTHER OUTPUTS'}")
    command = f"tpukit check --torch {__file__}:build --on v6e-8"
    print(f"next            {command} --batch-size 8 --sequence-length 256")


if __name__ == "__main__":
    main()
