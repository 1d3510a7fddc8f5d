"""Static times of attention programs, and the file that keeps those of others' kernels."""

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from attention_rivals.cases import Case
from attention_rivals.contenders import Attention
from tpukit.errors import TPUError
from tpukit.hardware import get_chip
from tpukit.hardware.target import target_chip
from tpukit.kernels.timing import calibration_of, estimate_kernel

KINDS = {"forward": "flash_attention", "backward": "flash_attention_backward"}
PACKAGES = ("jax", "jaxlib", "libtpu", "tokamax")


@dataclass(frozen=True)
class Timing:
    """Static figures of one direction."""

    time_us: float
    kernel_cycles: float


def time_of(attend: Attention, case: Case, chip: str, direction: str) -> Timing | str:
    """Of the result alone; or of the gradient alone, given what the forward pass keeps for it."""
    facts = get_chip(chip)
    kind = jax.sharding.AbstractDevice(facts.device_kinds[0], facts.cores_per_device, "tpu")
    mesh = AbstractMesh((), (), abstract_device=kind)
    flat = [
        jax.ShapeDtypeStruct((1, case.tokens, heads * case.width), jnp.bfloat16)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    ]

    def forward(q: Any, k: Any, v: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return attend(*_heads(case, q, k, v)).reshape(q.shape)

    def kept(q: Any, k: Any, v: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh):
            _, pull = jax.vjp(attend, *_heads(case, q, k, v))
        return [_flat(case, x) for x in jax.tree.leaves(pull) if _is_kept(case, x)]

    def backward(q: Any, k: Any, v: Any, cotangent: Any, residuals: list[Any]) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            # What the forward pass made is given, so that its kernel is nobody's and goes.
            _, pull = jax.vjp(attend, *_heads(case, q, k, v))
            leaves, tree = jax.tree.flatten(pull)
            given = iter(residuals)
            leaves = [next(given).reshape(x.shape) if _is_kept(case, x) else x for x in leaves]
            gradients = jax.tree.unflatten(tree, leaves)(*_heads(case, cotangent))
        return [x.reshape(1, case.tokens, -1) for x in gradients]

    try:
        if direction == "forward":
            found = estimate_kernel(forward, flat, chip, kind=KINDS[direction])
        else:
            with target_chip(chip):
                shapes = jax.eval_shape(kept, *flat)
            arguments = [*flat, flat[0], shapes]
            found = estimate_kernel(backward, arguments, chip, kind=KINDS[direction])
    except TPUError as error:
        return str(error).splitlines()[0][:160]
    if found.time_s is None:
        return found.reason[:160]
    return Timing(found.time_s * 1e6, found.cycles)


def _heads(case: Case, *arrays: Any) -> list[Any]:
    return [x.reshape(1, case.tokens, -1, case.width) for x in arrays]


def _flat(case: Case, x: Any) -> Any:
    """As a projection makes it, if it is one of those arrays; else as the kernel left it."""
    rows = x.ndim == 4 and x.shape[:2] == (1, case.tokens)
    return x.reshape(1, case.tokens, -1) if rows else x


def _is_kept(case: Case, x: Any) -> bool:
    """Whether it is kept for each token; tables of a mask are made again, for their values."""
    traced = isinstance(x, jax.core.Tracer)
    return traced and jnp.issubdtype(x.dtype, jnp.floating) and x.size >= case.tokens


class Kept:
    """Times on disk, each good for the versions, rates and programs it was made with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = (
            json.loads(path.read_text("utf-8")) if path.exists() else {}
        )

    def load(self, label: str, identity: str) -> Timing | str | None:
        """What was stored under a label, if nothing it depends on has changed."""
        entry = self._entries.get(label)
        if entry is None or entry["identity"] != identity:
            return None
        return entry["reason"] if "reason" in entry else _timing(entry)

    def labels(self, start: str, identity: str) -> list[str]:
        """The labels with that start whose entries still hold."""
        return [
            label
            for label, entry in self._entries.items()
            if label.startswith(start) and entry["identity"] == identity
        ]

    def store(self, label: str, identity: str, found: Timing | str) -> None:
        """Keep a time, or why there is none, at once."""
        entry: dict[str, Any] = {"identity": identity, "origin": "model"}
        if isinstance(found, str):
            entry["reason"] = found
        else:
            entry |= {
                "time_us": round(found.time_us, 2),
                "kernel_cycles": round(found.kernel_cycles),
            }
        self._entries[label] = entry
        ordered = {name: self._entries[name] for name in sorted(self._entries)}
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in ordered.items())
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(f"{{\n{lines}\n}}\n", "utf-8")


def identity_of(chip: str, direction: str) -> str:
    """What a time of another's kernel depends on, beside the case and its blocks.

    Not the share of HBM: most times in the file were made when kernels were credited with .88 of
    it. Today's is lower, so that a kept time is the least that their kernel takes, and ours, timed
    by today's rates, is compared with that. v6e's gradients were timed with .95 of it and 50 cycles
    more a turn: three of them timed again took -0.4, +2.9 and +9.5 %.
    """
    rates = asdict(calibration_of(chip, KINDS[direction]))
    del rates["hbm_efficiency"]
    parts = {
        "versions": {name: version(name) for name in PACKAGES},
        "rates": rates,
        "programs": _programs(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _programs() -> str:
    """The rivals' programs, whatever the files they import are called."""
    tree = ast.parse((Path(__file__).parent / "contenders.py").read_text("utf-8"))
    tree.body = [one for one in tree.body if not isinstance(one, ast.Import | ast.ImportFrom)]
    return ast.dump(tree)


def _timing(entry: Mapping[str, Any]) -> Timing:
    return Timing(entry["time_us"], entry["kernel_cycles"])
