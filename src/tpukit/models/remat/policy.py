"""Remat policies: what the backward pass recomputes instead of keeping."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import TPUModelError, did_you_mean
from ...plain_data import JsonObject
from ...shown import Shown

F = TypeVar("F", bound=Callable[..., Any])

# Tensors of the reference transformer that a policy may name; some names cover several tensors.
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
# Names of policies. No other file may write them; see `RematPolicy` for their meaning.
NONE, EVERYTHING, MINIMAL, DOTS, NAMES = "none", "everything", "minimal", "dots", "names"
FULL, NOTHING_SAVEABLE = "full", "nothing_saveable"
# Our name -> the name in jax.checkpoint_policies; None sets no checkpoints.
_POLICIES: dict[str, str | None] = {
    NONE: None,
    EVERYTHING: "everything_saveable",
    FULL: "nothing_saveable",
    NOTHING_SAVEABLE: "nothing_saveable",
    MINIMAL: "dots_with_no_batch_dims_saveable",
    DOTS: "dots_saveable",
    NAMES: "save_and_offload_only_these_names",
}


@dataclass(frozen=True, kw_only=True)
class RematPolicy(Shown):
    """What to keep from the forward pass; the backward pass recomputes the rest.

    Policies: `none` (keep all, no checkpoints), `everything` (checkpoints that keep all),
    `full` or `nothing_saveable` (keep only the inputs of each segment), `minimal` (keep results
    of matmuls with weights), `dots` (keep results of every matmul), `names` (keep tensors of
    `save` on the chip, and tensors of `offload` in host memory). A segment is `every_n_layers`
    layers.

    Example:
        >>> str(RematPolicy.parse("save=out_proj offload=qkv_proj,decoder_layer_input"))
        'save=out_proj offload=qkv_proj,decoder_layer_input'
    """

    policy: str = NONE
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
            raise TPUModelError(f"every_n_layers={self.every_n_layers}; expected at least 1.")
        if self.policy == NONE and self.every_n_layers > 1:
            raise TPUModelError(
                f"policy '{NONE}' makes no segments; use '{FULL}' with every_n_layers."
            )
        if (self.policy == NAMES) != bool(self.save or self.offload):
            raise TPUModelError(
                f"policy '{self.policy}' with save={list(self.save)}, offload="
                f"{list(self.offload)}; policy '{NAMES}' needs tensor names, and no other has any."
            )
        both = set(self.save) & set(self.offload)
        if both:
            raise TPUModelError(
                f"{', '.join(sorted(both))} is both saved and offloaded; choose one."
            )

    @classmethod
    def parse(cls, value: "RematSpec") -> "RematPolicy":
        """Parse "full", "full every=2", "save=a,b offload=c", a mapping, or None for no remat."""
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
            fields.setdefault("policy", NAMES)
        return cls(**fields)

    def __str__(self) -> str:
        words = [] if self.policy == NAMES else [self.policy]
        words += [f"every={self.every_n_layers}"] if self.every_n_layers > 1 else []
        words += [f"save={','.join(self.save)}"] if self.save else []
        words += [f"offload={','.join(self.offload)}"] if self.offload else []
        return " ".join(words)

    def to_dict(self) -> JsonObject:
        """Return plain data that `parse` reads back."""
        return {
            "policy": self.policy,
            "every_n_layers": self.every_n_layers,
            "save": list(self.save),
            "offload": list(self.offload),
        }

    @property
    def active(self) -> bool:
        """Whether anything is checkpointed."""
        return self.policy != NONE

    @property
    def keeps_everything(self) -> bool:
        """Whether the backward pass recomputes nothing."""
        return self.policy in (NONE, EVERYTHING)

    @property
    def keeps_inputs_only(self) -> bool:
        """Whether only the inputs of each segment are kept."""
        return self.policy in (FULL, NOTHING_SAVEABLE)

    def jax_policy(self) -> Callable[..., Any]:
        """Return the policy argument of `jax.checkpoint`."""
        import jax

        name = _POLICIES[self.policy]
        if name is None:
            raise TPUModelError(f"policy '{NONE}' has no jax counterpart; check `active` first.")
        if self.policy != NAMES:
            return getattr(jax.checkpoint_policies, name)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=_expand(self.save),
            names_which_can_be_offloaded=_expand(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def wrap(self, function: F, *, in_loop: bool = False) -> F:
        """Return the function under `jax.checkpoint`; `in_loop` inside scan, which needs no CSE."""
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
            fields.setdefault("policy", NAMES)
        else:
            raise TPUModelError(
                f"remat '{text}': '{key}' is not a setting; write a policy name, every=N, "
                f"save=a,b or offload=a,b.{did_you_mean(key, ('every', 'save', 'offload'))}"
            )
    return fields


def _expand(names: tuple[str, ...]) -> list[str]:
    # Other names are passed on, because user models define their own with checkpoint_name.
    return [tensor for name in names for tensor in TENSOR_NAMES.get(name, (name,))]
