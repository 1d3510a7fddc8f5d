"""A module whose forward runs as compiled programs, one per kind of call."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ...annotations import PyTree
from ...errors import TPUModelError
from ...models.adapters.torch_module.arrays import to_array, to_tensor
from ...models.adapters.torch_module.state import ModuleState
from ..batches import TorchInputs
from ..prepared import link_of
from .building import ForwardProgram
from .call import CallKind, CallReader, ModuleCall, as_arguments

if TYPE_CHECKING:
    import torch


class PlacedState:
    """A module's tensors as arrays on the device, kept up to date.

    Before each use every tensor is checked for its identity, address and version, which torch
    raises with each in-place write. A write through `tensor.data` is not detected; `refresh` copies
    all tensors again.

    Attributes:
        narrowed: Paths of float64 tensors, which become float32 arrays.
    """

    def __init__(self, module: "torch.nn.Module", device: Any) -> None:
        self._module, self._device = module, device
        self.refresh()

    def refresh(self) -> None:
        """Read the module again.

        Raises:
            TPUModelError: The module has no values.
        """
        state = ModuleState.of(self._module)
        if not state.has_values:
            raise TPUModelError(
                f"{type(self._module).__name__} is on torch's meta device and has no values to "
                "run with; build it without torch.device('meta'), or check its shapes only with "
                "compile_for."
            )
        self.narrowed = state.narrowed()
        self._tensors = {**state.trained, **state.carried}
        self._homes = {path: self._home(path) for path in self._tensors}
        self._stamps = {path: _stamp(tensor) for path, tensor in self._tensors.items()}
        self._trained = {path: self._place(tensor) for path, tensor in state.trained.items()}
        self._carried = {path: self._place(tensor) for path, tensor in state.carried.items()}

    def arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return trained parameters and other state, each by path."""
        link = link_of(self._module)
        if link is not None:
            link.pull()  # newer values of fused steps
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
        """Copy the state that the forward changed, such as running statistics, to the module."""
        import torch

        for path, array in written.items():
            tensor = self._tensors[path]
            with torch.no_grad():
                tensor.copy_(to_tensor(array))
            self._carried[path], self._stamps[path] = array, _stamp(tensor)

    def _home(self, path: str) -> tuple[Any, str]:
        inside, _, name = path.replace("/", ".").rpartition(".")
        return self._module.get_submodule(inside), name

    def _place(self, tensor: "torch.Tensor") -> jax.Array:
        return jax.device_put(to_array(tensor), self._device)


def _stamp(tensor: "torch.Tensor") -> tuple[int, int]:
    """Return a value that changes when a tensor is written to or moved."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version


if TYPE_CHECKING:
    import torch

FindProgram = Callable[["CompiledModel", ModuleCall], ForwardProgram]


class CompiledModel:
    """A compiled forward that is called like the module, with torch tensors.

    A call with new shapes, dtypes, settings or another mode compiles again, and the change is
    reported. The next call uses weights that an optimizer or `load_state_dict` has changed, and
    running statistics are written back. It has no gradients; `TPUBackend.prepare_model` does.

    Attributes:
        module: The module itself.
    """

    def __init__(self, module: "torch.nn.Module", find_program: FindProgram) -> None:
        self.module = module
        self.reader = CallReader(module)
        self.state = PlacedState(module, jax.devices()[0])
        self._find_program = find_program
        self._programs: dict[CallKind, ForwardProgram] = {}

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def kinds(self) -> tuple[CallKind, ...]:
        """The kinds of calls that were compiled, in order."""
        return tuple(self._programs)

    def prepare(self, sample_inputs: TorchInputs) -> None:
        """Compile for sample inputs: a tensor, a tuple of arguments, or a dict by name."""
        arguments, options = as_arguments(sample_inputs)
        self._program(self.reader.read(arguments, options))

    def __call__(self, *arguments: Any, **options: Any) -> PyTree:
        """Run the forward.

        Raises:
            TPUValidationError: The forward does not accept the arguments; or validation is strict
                and the call needs another compile.
        """
        call = self.reader.read(arguments, options)
        program = self._programs.get(call.kind) or self._program(call)
        trained, carried = self.state.arrays()
        tensors = [self._place(tensor) for tensor in call.tensors]
        seed = np.uint32(_draw_seed() if program.draws_random else 0)
        outputs, written = program.run(trained, carried, seed, tensors)
        result = program.result.outputs(outputs)
        # Inputs may share memory with arrays, so they must not change before the program ends.
        jax.block_until_ready((outputs, written))
        self.state.write_back(written)
        return result

    def refresh(self) -> None:
        """Copy the module's weights again, after a write that torch does not detect (`.data`)."""
        self.state.refresh()

    def __repr__(self) -> str:
        return f"CompiledModel({self.name}, programs={len(self._programs)})"

    def _program(self, call: ModuleCall) -> ForwardProgram:
        program = self._find_program(self, call)
        self._programs[call.kind] = program
        return program

    def _place(self, tensor: "torch.Tensor") -> jax.Array:
        return jax.device_put(to_array(tensor, copy=False), jax.devices()[0])


def _draw_seed() -> int:
    """Draw from torch's generator, so that `torch.manual_seed` makes runs repeatable."""
    import torch

    return int(torch.randint(2**31 - 1, ()))
