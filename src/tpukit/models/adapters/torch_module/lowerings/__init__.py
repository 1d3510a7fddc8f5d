"""How some of torch's functions become jax here, in place of torchax's own way.

Attention, norms and the loss of a vocabulary go to our kernels, which split themselves over a
mesh. The others are here because torchax lacks them or gives other numbers than eager torch does;
`tests/support/torch_zoo` compares every one.
"""

from typing import Any

from . import attention, convolutions, embeddings, losses, norms, pooling, tensors


def install(environment: Any) -> None:
    """Give an environment our lowerings."""

    def as_jax(function: Any) -> Any:
        def lowered(*arguments: Any, **options: Any) -> Any:
            arguments, options = environment.t2j_iso((arguments, options))
            return environment.j2t_iso(function(*arguments, **options))

        return lowered

    for part in (attention, convolutions, embeddings, losses, norms, pooling, tensors):
        for function, lowering in part.lowerings().items():
            environment.override_op_definition(function, as_jax(lowering))
    for function, lowering in norms.lowerings_in_torch().items():
        environment.override_op_definition(function, lowering)
