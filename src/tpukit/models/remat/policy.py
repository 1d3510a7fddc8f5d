"""What the backward pass recomputes instead of remembering, as a value that can be written down."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import TPUModelError, did_you_mean
from ...shown import Shown

F = TypeVar("F", bound=Callable[..., Any])

# Tensors of the reference transformer a policy may name; one name may stand for several.
TENSOR_NAMES: dict[str, tuple[str, ...]] = {
    "decoder_layer_input": ("decoder_layer_input",),
    "query_proj": ("query_proj",),
    "key_proj": ("key_proj",),
    "value_proj": ("value_proj",),
    "qkv_proj": ("query_proj", "key_proj", "value_proj"),
    "context": ("context",),
    "attention": ("attention",),
    "out_proj": ("out_proj",),
    "mlpwi": ("mlpwi_0", "mlpwi_1"),
    "mlpwi_0": ("mlpwi_0",),
    "mlpwi_1": ("mlpwi_1",),
    "mlpwo": ("mlpwo",),
    "expert_rows": ("expert_rows",),
    "expert_tokens": ("expert_tokens",),
}
# Our name -> jax.checkpoint_policies' name; None recomputes nothing at all.
_POLICIES: dict[str, str | None] = {
    "none": None,
    "everything": "everything_saveable",
    "full": "nothing_saveable",
    "nothing_saveable": "nothing_saveable",
    "minimal": "dots_with_no_batch_dims_saveable",
    "dots": "dots_saveable",
    "names": "save_and_offload_only_these_names",
}


@dataclass(frozen=True, kw_only=True)
class RematPolicy(Shown):
    """What to keep from the forward pass; all else is computed again in the backward pass.

    Policies: `none` (keep all, no checkpoints), `everything` (checkpoints that keep all),
    `full` or `nothing_saveable` (keep only the inputs of each segment), `minimal` (keep
    products with weights), `dots` (keep every product), `names` (keep what `save` names on
    the chip, and what `offload` names in host memory). A segment is `every_n_layers` layers.

    Example:
        >>> str(RematPolicy.parse("save=out_proj offload=qkv_proj,decoder_layer_input"))
        'save=out_proj offload=qkv_proj,decoder_layer_input'
    """

    policy: str = "none"
    every_n_layers: int = 1
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise TPUModelError(
                f"remat policy '{self.policy}' is not one of {', '.join(_POLICIES)}."
                + did_you_mean(self.policy, _POLICIES)
            )
        if self.every_n_layers < 1:
            raise TPUModelError(
                f"every_n_layers={self.every_n_layers}; a segment has at least 1 layer."
            )
        if self.policy == "none" and self.every_n_layers > 1:
            raise TPUModelError("policy 'none' makes no segments; use 'full' with every_n_layers.")
        if (self.policy == "names") != bool(self.save or self.offload):
            raise TPUModelError(
                f"policy '{self.policy}' with save={list(self.save)}, offload="
                f"{list(self.offload)}; tensor names go with policy 'names', and only with it."
            )
        both = set(self.save) & set(self.offload)
        if both:
            raise TPUModelError(
                f"{', '.join(sorted(both))} is both saved and offloaded; choose one."
            )

    @classmethod
    def parse(cls, value: "RematSpec") -> "RematPolicy":
        """Read "full", "full every=2", "save=a,b offload=c", a mapping, or None for no remat."""
        if value is None:
            return cls()
        if isinstance(value, RematPolicy):
            return value
        if isinstance(value, str):
            return cls(**_read_words(value))
        known = {field.name for field in dataclasses.fields(cls)}
        for key in value:
            if key not in known:
                raise TPUModelError(
                    f"'{key}' is not a remat setting; use {', '.join(sorted(known))}."
                    + did_you_mean(str(key), known)
                )
        fields: dict[str, Any] = dict(value)
        for key in ("save", "offload"):
            fields[key] = tuple(fields.get(key, ()))
        if fields["save"] or fields["offload"]:
            fields.setdefault("policy", "names")
        return cls(**fields)

    def __str__(self) -> str:
        words = [] if self.policy == "names" else [self.policy]
        words += [f"every={self.every_n_layers}"] if self.every_n_layers > 1 else []
        words += [f"save={','.join(self.save)}"] if self.save else []
        words += [f"offload={','.join(self.offload)}"] if self.offload else []
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `parse` reads back."""
        return {
            "policy": self.policy,
            "every_n_layers": self.every_n_layers,
            "save": list(self.save),
            "offload": list(self.offload),
        }

    @property
    def active(self) -> bool:
        """Whether anything is checkpointed."""
        return self.policy != "none"

    def jax_policy(self) -> Callable[..., Any]:
        """The policy as `jax.checkpoint` takes it."""
        import jax

        name = _POLICIES[self.policy]
        if name is None:
            raise TPUModelError("policy 'none' has no jax counterpart; ask `active` first.")
        if self.policy != "names":
            return getattr(jax.checkpoint_policies, name)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=_expand(self.save),
            names_which_can_be_offloaded=_expand(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def wrap(self, function: F, *, in_loop: bool = False) -> F:
        """The function with this policy on it; `in_loop` inside scan, where CSE cannot reach."""
        import jax

        if not self.active:
            return function
        checkpoint: Any = jax.checkpoint
        return checkpoint(function, policy=self.jax_policy(), prevent_cse=not in_loop)


RematSpec = RematPolicy | str | Mapping[str, Any] | None
NO_REMAT = RematPolicy()


def _read_words(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            fields["policy"] = word
        elif key == "every":
            if not value.isdigit():
                raise TPUModelError(f"remat '{text}': every={value} is not a whole number.")
            fields["every_n_layers"] = int(value)
        elif key in ("save", "offload"):
            fields[key] = tuple(name for name in value.split(",") if name)
            fields.setdefault("policy", "names")
        else:
            raise TPUModelError(
                f"remat '{text}': '{key}' is not a setting; write a policy name, every=N, "
                f"save=a,b or offload=a,b.{did_you_mean(key, ('every', 'save', 'offload'))}"
            )
    return fields


def _expand(names: tuple[str, ...]) -> list[str]:
    # A name of the user's own model (their checkpoint_name) is passed on as it is.
    return [tensor for name in names for tensor in TENSOR_NAMES.get(name, (name,))]
