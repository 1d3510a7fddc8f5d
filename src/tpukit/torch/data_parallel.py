"""Data parallelism between processes: one exchange of all gradients at the end of a backward."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .distributed import XLADistributedTraining


class AveragedGradients(nn.Module):
    """A module whose gradients are the mean over processes after `loss.backward()`.

    A hook on the parameters notices the backward, and when it ends all gradients go through one
    all-reduce for each number format. Gradients that earlier backwards left are equal everywhere,
    so their mean with the new ones is right; inside `no_sync()` they stay local until the next
    backward outside of it. A parameter that some processes did not use counts there as zero; one
    that nobody used keeps `grad=None`.

    Parameters keep their names, so `state_dict()` is that of the module itself.
    """

    def __init__(self, module: nn.Module, distributed: "XLADistributedTraining") -> None:
        super().__init__()
        self.module = module
        self._distributed = distributed
        self._synchronised = True
        self._queued = False
        self._trained = [one for one in module.parameters() if one.requires_grad]
        self._start_alike()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._at_the_end)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module itself."""
        return self.module(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the state of the module itself."""
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Load a state of the module itself."""
        return self.module.load_state_dict(*arguments, **keywords)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Leave gradients local, to add up several micro-batches before one exchange."""
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def _start_alike(self) -> None:
        """Take all values from process 0: averaged gradients keep equal models equal."""
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                tensor.copy_(self._distributed.broadcast(tensor))

    def _at_the_end(self, parameter: torch.Tensor) -> None:
        if self._queued or not self._synchronised:
            return
        self._queued = True
        engine = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]  the only way to learn that a backward ends
        engine.queue_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        by_format: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self._trained:
            by_format.setdefault(parameter.dtype, []).append(parameter)
        for dtype, parameters in by_format.items():
            self._average_of(dtype, parameters)

    def _average_of(self, dtype: torch.dtype, parameters: list[torch.Tensor]) -> None:
        grads = [parameter.grad for parameter in parameters]
        wide = torch.promote_types(dtype, torch.float32)
        used = torch.tensor([grad is not None for grad in grads], dtype=wide)
        parts = [
            torch.zeros(parameter.numel(), dtype=wide)
            if grad is None
            else grad.reshape(-1).to(wide)
            for parameter, grad in zip(parameters, grads, strict=True)
        ]
        joined = self._distributed.all_reduce(torch.cat([used, *parts]), op="mean")
        used, *means = joined.split([len(parameters), *(one.numel() for one in parameters)])
        for parameter, by_any, mean in zip(parameters, used.tolist(), means, strict=True):
            if by_any:
                value = mean.reshape(parameter.shape).to(parameter.dtype)
                parameter.grad = value if parameter.grad is None else parameter.grad.copy_(value)
