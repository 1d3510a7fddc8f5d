"""One module of the zoo: how it is built, and what it is called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# How one input is made: the shape of normal numbers, or a function that draws it.
Draw = tuple[int, ...] | Callable[[torch.Generator], torch.Tensor]


class Called(nn.Module):
    """A function of tensors as a module, with the modules or parameters that it uses inside."""

    def __init__(self, function: Callable[..., Any], **inside: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = list(inside)
        for name, one in inside.items():
            setattr(self, name, one if isinstance(one, nn.Module) else nn.Parameter(one))

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self.function(*arguments, *(getattr(self, name) for name in self.names))


@dataclass(frozen=True)
class Entry:
    """A module, its inputs, and the kind of thing it is.

    Attributes:
        kind: The group it is counted in.
        name: What the table calls it.
        build: Makes it, with values from torch's seed.
        draws: Its positional inputs.
        training: Whether it runs in training mode; anything with dropout cannot be compared there.
    """

    kind: str
    name: str
    build: Callable[[], nn.Module]
    draws: tuple[Draw, ...]
    training: bool = True

    def module(self) -> nn.Module:
        """Return the module, the same values each time."""
        torch.manual_seed(0)
        return self.build().train(self.training)

    def inputs(self) -> list[torch.Tensor]:
        """Return its inputs, the same values each time; labels want no gradient."""
        generator = torch.Generator().manual_seed(1)
        return [
            draw(generator)
            if callable(draw)
            else torch.randn(draw, generator=generator, requires_grad=True)
            for draw in self.draws
        ]


def whole(most: int, *shape: int) -> Draw:
    """Return how whole numbers from 0 to below `most` are drawn."""
    return lambda generator: torch.randint(0, most, shape, generator=generator)


def positive(*shape: int) -> Draw:
    """Return how numbers between 0.05 and 0.95 are drawn."""
    return lambda generator: (0.05 + 0.9 * torch.rand(shape, generator=generator)).requires_grad_()


def signs(*shape: int) -> Draw:
    """Return how -1 and 1 are drawn."""
    return lambda generator: torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0


def distinct(*shape: int) -> Draw:
    """Return how numbers are drawn of which no two are near: an order that rounding keeps."""

    def draw(generator: torch.Generator) -> torch.Tensor:
        count = torch.Size(shape).numel()
        values = torch.randperm(count, generator=generator).float() / 8 - count / 16
        return values.view(shape).requires_grad_()

    return draw
