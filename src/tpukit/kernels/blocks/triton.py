"""Block sizes that Triton takes: powers of two."""


def dividing_columns(width: int, *, most: int) -> int:
    """The largest power of two that divides the width, `most` (a power of two) at most."""
    return min(most, width & -width)
