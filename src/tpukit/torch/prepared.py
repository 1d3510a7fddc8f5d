"""A prepared module: the user's own object, whose calls run as compiled programs."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import jax

from ..errors import TPUModelError, TPUValidationError
from ..models.adapters.torch_module.arrays import to_array, to_tensor
from ..models.adapters.torch_module.environment import environment
from ..models.adapters.torch_module.nesting import take_apart
from ..models.adapters.torch_module.state import ModuleState
from ..models.remat.policy import NO_REMAT, RematPolicy
from .border import ArgumentPlacement, Arrays, ModuleProgram, call_with_gradient
from .lru import LRUCache

logger = logging.getLogger(__name__)

_LINK = "_tpukit_link"


class Link:
    """What connects one module with its programs, and with newer values on the device.

    A module keeps its own parameters. After fused steps the device holds newer ones; whoever
    reads the module through its attributes, `parameters()` or `state_dict()` gets those.
    """

    def __init__(
        self,
        module: Any,
        *,
        remat: RematPolicy = NO_REMAT,
        programs: Callable[[], int | None] | None = None,
        strict: bool = False,
        donate: bool = False,
    ) -> None:
        self.module, self.remat, self.strict, self.donate = module, remat, strict, donate
        self.placement: ArgumentPlacement | None = None  # on one device, unless somebody splits it
        self.stays_eager = ""  # why the module cannot be a program, once that is known
        self.programs: LRUCache[Any, ModuleProgram] = LRUCache(max_size=programs)
        self.newer: Any = None  # a function that brings the device's values, while there are any
        self._signature: Any = None
        self._state: ModuleState | None = None
        self._seed = jax.random.key(0)
        self._calls = 0

    def pull(self) -> None:
        """Bring newer values from the device into the module's own tensors."""
        if self.newer is not None:
            bring, self.newer = self.newer, None
            bring()

    def give_up(self, error: TPUModelError) -> None:
        """Let the module run as plain torch from now on, and say why.

        Raises:
            TPUValidationError: Validation is strict.
        """
        if self.strict:
            raise TPUValidationError(str(error)) from error
        self.stays_eager = str(error)
        logger.warning("%s It runs in plain torch, not compiled.", error)

    def seed(self, key: jax.Array) -> None:
        """Draw all random numbers from `key` on."""
        self._seed, self._calls = key, 0

    def call(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the module's forward as a program; compiled once for each shape of arguments."""
        import torch

        self.pull()
        state = self._current_state()
        tensors, nesting = take_apart((arguments, options))
        gradient = torch.is_grad_enabled()
        asked = tuple(gradient and one.requires_grad for one in tensors)
        wanted = any(asked) or (gradient and bool(state.trained))
        shapes = tuple((one.shape, one.dtype) for one in tensors)
        key = (nesting, shapes, asked, self._signature, self.remat)
        program = self.programs.get(key)
        if program is None:
            logger.info("compile module=%s shapes=%s", type(self.module).__name__, shapes)
            how: dict[str, Any] = {"placement": self.placement, "donate": self.donate}
            program = ModuleProgram(self.module, state, nesting.rebuild, asked, self.remat, **how)
            self.programs.put(key, program)
        # What is donated must not be torch's own memory.
        given = [to_array(one, copy=self.donate and not wanted) for one in tensors]
        self._calls += 1
        arrays = Arrays(
            params={path: to_array(one, copy=False) for path, one in state.trained.items()},
            carried={path: to_array(one, copy=False) for path, one in state.carried.items()},
            moving=[one for one, yes in zip(given, asked, strict=True) if yes],
            fixed=[one for one, yes in zip(given, asked, strict=True) if not yes],
            key=jax.random.fold_in(self._seed, self._calls),
        )
        if wanted:
            moving = [one for one, yes in zip(tensors, asked, strict=True) if yes]
            behind = [*state.trained.values(), *moving]
            floats, others, changed = call_with_gradient(program, arrays, behind)
        else:
            found, (others, changed) = program.forward(arrays)
            floats = [to_tensor(one) for one in jax.block_until_ready(found)]
        state.write({}, changed)  # running statistics
        return program.outputs(floats, [_whole_numbers(one) for one in others])

    def _current_state(self) -> ModuleState:
        """Return the module's tensors, read again where it was changed in between."""
        modules = tuple((id(one), one.training) for one in self.module.modules())
        tensors = tuple((id(one), one.requires_grad) for one in self.module.parameters())
        if self._state is None or (modules, tensors) != self._signature:
            self._state, self._signature = ModuleState.of(self.module), (modules, tensors)
        return self._state


def prepare(module: Any, **options: Any) -> Any:
    """Make a module's calls run as programs; the same object is returned.

    Its class is replaced by one of the same name that derives from it, so `isinstance`, attributes
    and state dicts stay as they were.
    """
    if link_of(module) is not None:
        return module
    environment()  # a missing package is said here, not in the first call
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Prepared, kind), {"__module__": kind.__module__})
    object.__setattr__(module, _LINK, Link(module, **options))
    return module


def release(module: Any) -> Any:
    """Turn a prepared module into what it was, with the newest values."""
    link = link_of(module)
    if link is not None:
        link.pull()
        object.__delattr__(module, _LINK)
        module.__class__ = type(module).__bases__[1]
    return module


def link_of(module: Any) -> Link | None:
    """Return what connects a prepared module; None of any other."""
    return vars(module).get(_LINK)


class _Prepared:
    """The first base of every prepared module's class."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        link = link_of(self)
        # While a program is traced, the module's own code runs.
        if link is None or environment().enabled:
            return super().forward(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of the user's class
        refusal: TPUModelError | None = None
        if not link.stays_eager:
            try:
                return link.call(arguments, options)
            except TPUModelError as error:
                refusal = error
        # A call that is simply wrong fails here too, in torch's own words, and decides nothing.
        outputs = super().forward(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of the user's class
        if refusal is not None:
            link.give_up(refusal)
        return outputs

    def __getattr__(self, name: str) -> Any:
        link = vars(self).get(_LINK)
        if link is not None and link.newer is not None:
            link.pull()
        return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def named_parameters(self, *arguments: Any, **options: Any) -> Any:
        _pulled(self)
        return super().named_parameters(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def named_buffers(self, *arguments: Any, **options: Any) -> Any:
        _pulled(self)
        return super().named_buffers(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        _pulled(self)
        return super().state_dict(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        _pulled(self)
        return super().load_state_dict(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module as it was before: a copy has programs of its own once it is prepared."""
        _pulled(self)
        kind: Any = type(self).__bases__[1]
        twin = kind.__new__(kind)
        memo[id(self)] = twin
        own = {name: one for name, one in vars(self).items() if name != _LINK}
        twin.__dict__.update(copy.deepcopy(own, memo))
        return twin


def _pulled(module: Any) -> None:
    link = link_of(module)
    if link is not None:
        link.pull()


def _whole_numbers(array: jax.Array) -> Any:
    """Return whole numbers as torch counts them: 64 bits for jax's 32."""
    import torch

    found = to_tensor(array)
    return found.long() if found.dtype == torch.int32 else found
