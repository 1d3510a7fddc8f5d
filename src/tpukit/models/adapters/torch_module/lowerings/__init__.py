"""Lowerings of torch functions to jax that replace those of torchax.

Attention, norms and the vocabulary loss use our kernels, which are sharded on a mesh. torchax lacks
the other functions or gives other numbers than eager torch; `tests/support/torch_zoo` compares all.
"""

from typing import Any

from . import convolutions, losses, norms, tensors


def install(environment: Any) -> None:
    """Install our lowerings in an environment."""

    def as_jax(function: Any) -> Any:
        def lowered(*arguments: Any, **options: Any) -> Any:
            arguments, options = environment.t2j_iso((arguments, options))
            return environment.j2t_iso(function(*arguments, **options))

        return lowered

    for part in (convolutions, losses, norms, tensors):
        for function, lowering in part.lowerings().items():
            environment.override_op_definition(function, as_jax(lowering))
    for function, lowering in norms.lowerings_in_torch().items():
        environment.override_op_definition(function, lowering)
