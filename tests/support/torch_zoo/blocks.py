"""Blocks that people write themselves."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as functional
from torch import nn
from torch.nn.utils import parametrizations

from .entry import Draw, Entry

PICTURE = (2, 4, 8, 8)


class Residual(nn.Module):
    """Two convolutions with norms, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in "ab")
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)), inplace=True)
        inner = self.norms[1](self.second(inner))
        inner += x
        return functional.relu_(inner)


class SqueezeExcite(nn.Module):
    """Channels weighted by what all pixels say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return x * self.up(functional.silu(self.down(mean))).sigmoid()


class UNet(nn.Module):
    """One level down, one up, joined by channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(2, 2 * width), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([x, self.up(self.middle(self.down(x)))], 1))


class Mixer(nn.Module):
    """Tokens mixed, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in "ab")
        self.tokens, self.channels = nn.Linear(tokens, tokens), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.gelu(self.tokens(self.norms[0](x).mT)).mT
        return x + functional.gelu(self.channels(self.norms[1](x)))


class ConvNext(nn.Module):
    """A depthwise convolution, then a product with channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
        self.gain = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.gain * inner).permute(0, 3, 1, 2)


class Experts(nn.Module):
    """Each token goes to its two best of four experts, weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.weights = nn.Parameter(torch.randn(4, width, width) / math.sqrt(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        gates = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, shares)
        return torch.einsum("bse,bsd,edf->bsf", gates, x, self.weights)


class RotaryAttention(nn.Module):
    """Attention of rotated queries and keys, written out by hand with a causal mask."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        angles = torch.outer(torch.arange(length), 100 ** -torch.arange(0, 1, 0.5))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (y * self.cos + torch.roll(y, 2, -1) * self.sin for y in (q, k))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // 2)
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out((shares @ v).transpose(1, 2).reshape(b, s, d))


class GatedMlp(nn.Module):
    """The feed-forward part of a Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 12, bias=False), nn.Linear(width, 12, bias=False)
        self.down = nn.Linear(12, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class StateSpace(nn.Module):
    """A linear recurrence along a sequence, in a loop."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay, self.read = nn.Parameter(torch.rand(width)), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = self.decay.sigmoid() * state + step
            found.append(self.read(state))
        return torch.stack(found, 1)


def blocks() -> Iterator[Entry]:
    """Yield every block."""
    tokens = (2, 6, 8)
    table: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
        "residual": (lambda: Residual(4), PICTURE),
        "squeeze and excite": (lambda: SqueezeExcite(4), PICTURE),
        "U-Net level": (lambda: UNet(4), PICTURE),
        "MLP-Mixer": (lambda: Mixer(6, 8), tokens),
        "ConvNeXt": (lambda: ConvNext(4), PICTURE),
        "experts, two best": (lambda: Experts(8), tokens),
        "rotary attention by hand": (lambda: RotaryAttention(8, 6), tokens),
        "gated MLP": (lambda: GatedMlp(8), tokens),
        "state space in a loop": (lambda: StateSpace(8), tokens),
        "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 5)), tokens),
        "weight_norm of a convolution": (
            lambda: parametrizations.weight_norm(nn.Conv2d(4, 6, 3)), PICTURE
        ),
        "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), tokens),
        "orthogonal, Householder": (lambda: parametrizations.orthogonal(nn.Linear(8, 5)), tokens),
    }  # fmt: skip
    for name, (build, shape) in table.items():
        yield Entry("block", name, build, (shape,))
    for training in (True, False):
        yield Entry(
            "block", "spectral_norm" + ("" if training else ", eval"),
            lambda: parametrizations.spectral_norm(nn.Linear(8, 5)), (tokens,), training,
        )  # fmt: skip
