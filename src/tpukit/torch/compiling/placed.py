"""A module's tensors as arrays on the device: copied once, and again where torch wrote to them."""

from collections.abc import Mapping
from typing import Any

import jax

from ...errors import TPUModelError
from ...models.adapters.torch_module.arrays import to_array, to_tensor
from ...models.adapters.torch_module.state import ModuleState
from ..prepared import link_of


class PlacedState:
    """The arrays of one module, as fresh as its tensors.

    Before each use the tensors are asked whether they are still the same objects, at the same
    address, in the same version: torch counts what is written in place. Only a write through
    `tensor.data` is not counted; `refresh` copies everything again.

    Attributes:
        narrowed: Paths of tensors of 64-bit floats, which are arrays of 32-bit ones.
    """

    def __init__(self, module: Any, device: Any) -> None:
        self._module, self._device = module, device
        self.refresh()

    def refresh(self) -> None:
        """Read the module anew.

        Raises:
            TPUModelError: It has no values.
        """
        state = ModuleState.of(self._module)
        if not state.has_values:
            raise TPUModelError(
                f"{type(self._module).__name__} is on torch's meta device and has no values to "
                "run with; build it without torch.device('meta'), or check its shapes alone with "
                "compile_for."
            )
        self.narrowed = state.narrowed()
        self._tensors = {**state.trained, **state.carried}
        self._homes = {path: self._home(path) for path in self._tensors}
        self._stamps = {path: _stamp(one) for path, one in self._tensors.items()}
        self._trained = {path: self._place(one) for path, one in state.trained.items()}
        self._carried = {path: self._place(one) for path, one in state.carried.items()}

    def arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Parameters that train, and all else, each by its path."""
        link = link_of(self._module)
        if link is not None:
            link.pull()  # what fused steps left on the device
        for path, (owner, name) in self._homes.items():
            tensor = getattr(owner, name)
            if tensor is not self._tensors[path]:
                self.refresh()
                break
            stamp = _stamp(tensor)
            if stamp != self._stamps[path]:
                self._stamps[path] = stamp
                kind = self._trained if path in self._trained else self._carried
                kind[path] = self._place(tensor)
        return self._trained, self._carried

    def write_back(self, written: Mapping[str, jax.Array]) -> None:
        """Give the module what its forward wrote, such as running statistics."""
        import torch

        for path, array in written.items():
            tensor = self._tensors[path]
            with torch.no_grad():
                tensor.copy_(to_tensor(array))
            self._carried[path], self._stamps[path] = array, _stamp(tensor)

    def _home(self, path: str) -> tuple[Any, str]:
        inside, _, name = path.replace("/", ".").rpartition(".")
        return self._module.get_submodule(inside), name

    def _place(self, tensor: Any) -> jax.Array:
        return jax.device_put(to_array(tensor), self._device)


def _stamp(tensor: Any) -> tuple[int, int]:
    """Return what changes when a tensor is written to or moved."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version
