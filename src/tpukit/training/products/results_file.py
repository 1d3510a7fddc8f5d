"""XLA's file of autotuning results, as far as it is about the algorithms of cuBLAS.

`xla_gpu_dump_autotune_results_to` writes it and `xla_gpu_load_autotune_results_from` reads it: a
text of blocks, each a key that XLA makes of an instruction and what was best for it. XLA writes
text only where the file's name ends in `.textproto`.
"""

import re

SUFFIX = ".textproto"
_GEMM = re.compile(r"gemm \{([^{}]*)\}")
_ALGORITHM = re.compile(r"\s*\balgorithm: \d+")


def blocks_of(text: str) -> list[str]:
    """The results in the file, one text each."""
    blocks, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                blocks.append(text[start : place + 1].strip())
                start = place + 1
    return blocks


def key_of(block: str) -> str | None:
    """What is the same whatever algorithm was chosen; None where it is not about cuBLAS."""
    return _GEMM.sub("gemm {}", block) if _GEMM.search(block) else None


def with_algorithm(block: str, algorithm: int) -> str:
    """The block with another choice in it."""
    return _GEMM.sub(
        lambda gemm: f"gemm {{{_ALGORITHM.sub('', gemm[1]).rstrip()} algorithm: {algorithm} }}",
        block,
    )
