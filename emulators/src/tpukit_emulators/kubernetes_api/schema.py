"""Checks the fields of a document against the schema of its kind (`data/schema.yaml`)."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

import yaml

from tpukit.errors import did_you_mean

# Versions of the kinds that are known, the newest first; others pass.
_KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
KINDS: dict[str, tuple[str, ...]] = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2",),
    "Job": ("batch/v1",),
    "Pod": ("v1",),
    "ConfigMap": ("v1",),
    "Secret": ("v1",),
    "ResourceFlavor": _KUEUE,
    "ClusterQueue": _KUEUE,
    "LocalQueue": _KUEUE,
    "WorkloadPriorityClass": _KUEUE,
    "AdmissionCheck": _KUEUE,
    "Topology": _KUEUE,
}


@dataclass(frozen=True)
class FieldError:
    """What is wrong with one field.

    Attributes:
        path: From the top of the document, as in `spec.replicatedJobs[0].replicas`.
        problem: One of "unknown", "missing", "type", "choice" and "gone".
    """

    path: str
    problem: str
    message: str


@cache
def _schema() -> Mapping[str, Any]:
    text = files("tpukit_emulators.kubernetes_api").joinpath("data/schema.yaml").read_text("utf-8")
    return cast("Mapping[str, Any]", yaml.safe_load(text))


def field_errors(document: Mapping[str, Any]) -> list[FieldError]:
    """Return every field that is unknown, missing or of another type.

    Only the newest version of a kind is known; documents of others have no errors.
    """
    known = KINDS.get(str(document.get("kind")))
    if known is None or document.get("apiVersion") != known[0]:
        return []
    return list(_check(document, _schema()[str(document["kind"])], ""))


def _check(value: object, expected: Any, path: str) -> Generator[FieldError]:
    if isinstance(expected, str) and expected.startswith("@"):
        expected = _schema()[expected[1:]]
    if value is None:
        return  # the same as leaving it out, in Kubernetes
    if isinstance(expected, dict):
        if isinstance(value, dict):
            yield from _check_fields(
                cast("Mapping[Any, Any]", value), cast("Mapping[str, Any]", expected), path
            )
        else:
            yield _type_error(path, value, "an object")
    elif isinstance(expected, list):
        if isinstance(value, list):
            (inner,) = cast("list[Any]", expected)
            for index, one in enumerate(cast("list[Any]", value)):
                yield from _check(one, inner, f"{path}[{index}]")
        else:
            yield _type_error(path, value, "a list")
    else:
        yield from _check_plain(value, str(expected), path)


def _check_fields(
    value: Mapping[Any, Any], fields: Mapping[str, Any], path: str
) -> Generator[FieldError]:
    known = {name.rstrip("!?"): name for name in fields}
    for key, inner in value.items():
        where = f"{path}.{key}" if path else str(key)
        name = known.get(str(key))
        if name is None:
            hint = did_you_mean(str(key), [one for one, full in known.items() if full[-1] != "?"])
            yield FieldError(where, "unknown", f"there is no field {key!r} here.{hint}")
        elif name.endswith("?"):
            yield FieldError(where, "gone", f"{key!r} is gone; write {fields[name]}.")
        else:
            yield from _check(inner, fields[name], where)
    for short, name in known.items():
        if name.endswith("!") and value.get(short) is None:
            yield FieldError(path or ".", "missing", f"{short!r} is missing.")


def _check_plain(value: object, expected: str, path: str) -> Generator[FieldError]:
    if expected == "any":
        return
    if "|" in expected:
        choices = expected.split("|")
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            yield FieldError(path, "choice", f"{value!r} is none of {', '.join(choices)}.{hint}")
        return
    if expected in ("map", "quantities"):
        if not isinstance(value, dict):
            yield _type_error(path, value, "names with values")
            return
        inner = "string" if expected == "map" else "quantity"
        for key, one in cast("Mapping[Any, Any]", value).items():
            if one is None or not isinstance(key, str):
                yield _type_error(f"{path}.{key}", one, "text")
            else:
                yield from _check_plain(one, inner, f"{path}.{key}")
        return
    is_right = {
        "string": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "quantity": isinstance(value, int | float | str) and not isinstance(value, bool),
    }[expected]
    if not is_right:
        wanted = {"string": "text", "bool": "true or false", "int": "a whole number"}
        yield _type_error(path, value, wanted.get(expected, "a quantity"))


def _type_error(path: str, value: object, wanted: str) -> FieldError:
    is_plain = not isinstance(value, dict | list)
    quoted = " (put it in quotes)" if wanted == "text" and is_plain else ""
    return FieldError(path, "type", f"{_short(value)} is not {wanted}{quoted}.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
