"""Pages of a list: a token is the last name of the page before, so changes between do no harm."""

from bisect import bisect_right
from collections.abc import Sequence

LARGEST_PAGE = 1000


def page_of(names: Sequence[str], size: int, token: str) -> tuple[Sequence[str], str]:
    """Return the page of sorted names after a token, and the token of the next page or ""."""
    size = min(size or LARGEST_PAGE, LARGEST_PAGE)
    first = bisect_right(names, token) if token else 0
    page = names[first : first + size]
    return page, page[-1] if first + size < len(names) else ""
