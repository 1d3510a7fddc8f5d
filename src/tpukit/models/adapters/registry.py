"""The registry of model kinds, in the order in which they are tried."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import jax

from ...errors import TPUModelError, did_you_mean
from ...frameworks import packages_of
from .equinox import EQUINOX
from .flax_linen import FLAX_LINEN
from .flax_nnx import FLAX_NNX, FLAX_NNX_FUNCTION
from .functions import FUNCTIONS
from .kind import Build, Checkpoint, ModelKind, Recognises
from .protocol import ModelAdapter, ModelInputs
from .torch_module import TORCH
from .transformer import REFERENCE_TRANSFORMER

# Functions come last, because any callable looks like one.
BUILT_IN = (
    REFERENCE_TRANSFORMER,
    FLAX_NNX,
    FLAX_LINEN,
    EQUINOX,
    TORCH,
    FUNCTIONS,
    FLAX_NNX_FUNCTION,
)
# Frameworks without an adapter, by package, with advice.
_WITHOUT_ADAPTER = {
    "keras": ("Keras", ""),
    "tensorflow": ("TensorFlow", ""),
    "haiku": (
        "Haiku",
        "pass (init, apply) as two functions of your own, init(rng) and apply(params, batch); ",
    ),
}
_registered: list[ModelKind] = []


@dataclass(frozen=True)
class Registration:
    """A registered adapter; as a context manager it is unregistered at the end."""

    name: str

    def __enter__(self) -> "Registration":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        unregister_adapter(self.name)


def register_adapter(
    name: str,
    *,
    recognises: Recognises,
    build: Build,
    accepts: str = "",
    checkpoint: Checkpoint | None = None,
) -> Registration:
    """Register an adapter for models of another framework.

    Registered adapters are tried before the built-in ones, the newest first.

    Args:
        name: The name of the framework.
        recognises: (object) -> whether it is a model of this framework. It is called for every
            model, so it must be cheap and import nothing.
        build: (model, inputs) -> a `ModelAdapter`; `inputs.arguments(batch)` returns the batch
            entries that the model is called with.
        accepts: A description of the model for error messages; "a <name> model" by default.
        checkpoint: (model, policy) -> the same model with gradient checkpoints, for
            `enable_gradient_checkpointing`.

    Returns:
        A context manager that unregisters the adapter at the end; without `with` it stays.

    Raises:
        TPUModelError: The name is registered already.
    """
    if name in (kind.name for kind in known_kinds()):
        raise TPUModelError(
            f"an adapter called '{name}' is registered already; choose another name, or call "
            f"unregister_adapter('{name}') first if it is yours."
        )
    kind = ModelKind(
        name=name,
        accepts=accepts or f"a {name} model",
        recognises=recognises,
        build=build,
        checkpoint=checkpoint,
    )
    _registered.insert(0, kind)
    return Registration(name)


def unregister_adapter(name: str) -> None:
    """Remove a registered adapter.

    Raises:
        TPUModelError: No registered adapter has this name; built-in adapters cannot be removed.
    """
    for kind in _registered:
        if kind.name == name:
            _registered.remove(kind)
            return
    own = [kind.name for kind in _registered]
    raise TPUModelError(
        f"'{name}' is not a registered adapter; registered are {', '.join(own) or 'none'}, and "
        "built-in adapters cannot be removed." + did_you_mean(name, own)
    )


def known_kinds() -> Iterator[ModelKind]:
    """Yield every kind of model in the order in which they are tried."""
    yield from _registered
    yield from BUILT_IN


def kind_of(model: object) -> ModelKind:
    """Return the first kind that recognises `model`.

    Raises:
        TPUModelError: None does; the message lists all kinds and how to add one.
    """
    for kind in known_kinds():
        if kind.recognises(model):
            return kind
    raise _unknown(model)


def is_model(value: object) -> bool:
    """Whether any kind recognises the value as a model."""
    return any(kind.recognises(value) for kind in known_kinds())


def adapt(
    model: object, *, inputs: Sequence[str], batch_shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> ModelAdapter:
    """Return the adapter for `model`.

    Args:
        model: Anything that one of the known kinds recognises.
        inputs: The batch entries that the model is called with.
        batch_shapes: Shape and dtype of every batch entry.

    Raises:
        TPUModelError: No kind recognises the model, or its adapter lacks a method.
    """
    kind = kind_of(model)
    adapter = kind.build(model, ModelInputs(tuple(inputs), dict(batch_shapes)))
    missing = [name for name in ("initialised", "init", "apply") if not hasattr(adapter, name)]
    if missing:
        raise TPUModelError(
            f"the adapter '{kind.name}' built a {type(adapter).__name__} without "
            f"{' and '.join(missing)}; see tpukit.models.ModelAdapter."
        )
    return adapter


def _unknown(model: object) -> TPUModelError:
    is_class = isinstance(model, type)
    name = f"the class {model.__name__}" if is_class else type(model).__name__
    known = ", ".join(kind.accepts for kind in known_kinds())
    seen, advice = f"{name} is not a supported model", "pass an instance; " if is_class else ""
    for package in packages_of(model):
        if package in _WITHOUT_ADAPTER:
            title, advice = _WITHOUT_ADAPTER[package]
            seen = f"{name} belongs to {title}, which has no adapter here"
            break
    return TPUModelError(
        f"{seen}; {advice}expected {known}. Add another framework with "
        "tpukit.models.register_adapter."
    )
