"""A module whose forward runs as compiled programs, one for each kind of call."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ...annotations import PyTree
from ...models.adapters.torch_module.arrays import to_array
from ..annotations import TorchInputs
from .building import ForwardProgram
from .call import CallKind, CallReader, ModuleCall, as_arguments
from .placed import PlacedState

if TYPE_CHECKING:
    import torch

FindProgram = Callable[["CompiledModel", ModuleCall], ForwardProgram]


class CompiledModel:
    """A module's forward, called as the module is: torch tensors in, torch tensors out.

    Shapes, formats, settings or a mode that were not there before are compiled for, and the change
    is named. It reads the module's weights where they are: what an optimizer or `load_state_dict`
    writes is seen by the next call, and running statistics are written back. There are no
    gradients through it; `TPUBackend.prepare_model` has those.

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
        """What the module's class is called."""
        return type(self.module).__name__

    @property
    def kinds(self) -> tuple[CallKind, ...]:
        """The kinds of calls that are compiled for, in the order they came."""
        return tuple(self._programs)

    def prepare(self, sample_inputs: TorchInputs) -> None:
        """Compile for inputs like these: a tensor, a tuple of arguments, or a dict by name."""
        arguments, options = as_arguments(sample_inputs)
        self._program(self.reader.read(arguments, options))

    def __call__(self, *arguments: Any, **options: Any) -> PyTree:
        """Run the forward.

        Raises:
            TPUValidationError: The forward takes no such arguments; under strict validation also
                where something would have to be compiled again.
        """
        call = self.reader.read(arguments, options)
        program = self._programs.get(call.kind) or self._program(call)
        trained, carried = self.state.arrays()
        tensors = [self._place(one) for one in call.tensors]
        seed = np.uint32(_draw_seed() if program.draws_random else 0)
        outputs, written = program.run(trained, carried, seed, tensors)
        result = program.result.outputs(outputs)
        # Inputs may share their memory with arrays: nobody may write to them before this is done.
        jax.block_until_ready((outputs, written))
        self.state.write_back(written)
        return result

    def refresh(self) -> None:
        """Copy the module's weights again, after a write that torch does not count (`.data`)."""
        self.state.refresh()

    def __repr__(self) -> str:
        return f"CompiledModel({self.name}, programs={len(self._programs)})"

    def _program(self, call: ModuleCall) -> ForwardProgram:
        found = self._find_program(self, call)
        self._programs[call.kind] = found
        return found

    def _place(self, tensor: Any) -> jax.Array:
        return jax.device_put(to_array(tensor, copy=False), jax.devices()[0])


def _draw_seed() -> int:
    """Draw from torch's own generator, so that `torch.manual_seed` repeats a run."""
    import torch

    return int(torch.randint(2**31 - 1, ()))
