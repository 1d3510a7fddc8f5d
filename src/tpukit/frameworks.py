"""Find the framework of an object among the loaded modules, without importing any."""

import sys


def is_instance_of(model: object, package: str, class_name: str = "Module") -> bool:
    """Whether `model` is an instance of a framework's class, e.g. ("flax.nnx", "Module").

    A framework that is not loaded cannot have made the model.
    """
    base = _loaded_class(package, class_name)
    return base is not None and isinstance(model, base)


def is_subclass_of(model: object, package: str, class_name: str = "Module") -> bool:
    """Whether `model` is a class, not an instance, that derives from a framework's class."""
    base = _loaded_class(package, class_name)
    return base is not None and isinstance(model, type) and issubclass(model, base)


def packages_of(model: object) -> list[str]:
    """Return the packages of an object's class (or of a class itself) and of its bases."""
    kind = model if isinstance(model, type) else type(model)
    return list(dict.fromkeys(base.__module__.partition(".")[0] for base in kind.__mro__))


def model_name(model: object) -> str:
    """Return a model's name: its configuration's name, its class, or its function.

    A pair of functions (init, apply) is named after its module, and a class by its own name.
    """
    of_config = getattr(getattr(model, "config", model), "name", None)
    if isinstance(of_config, str) and of_config:
        return of_config
    if isinstance(model, tuple) and model:
        return model_name(model[-1])  # pyright: ignore[reportUnknownArgumentType]  of anything
    inner = getattr(model, "func", model)  # what functools.partial holds
    named = getattr(inner, "__qualname__", None)
    if isinstance(named, str) and (isinstance(inner, type) or callable(inner)):
        words = [word for word in named.split(".") if word not in ("<locals>", "<lambda>")]
        return words[-1] if words else "a function"
    return type(inner).__name__


def _loaded_class(package: str, name: str) -> type | None:
    found = getattr(sys.modules.get(package), name, None)
    return found if isinstance(found, type) else None
