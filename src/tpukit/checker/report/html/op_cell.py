"""An op in a table: its name, where in the user's program it is from, the line of source."""

from ....pages.markup import Markup, join, tag
from ....pages.parts import code


def op_cell(name: str, where: str, source: str | None = None) -> Markup:
    """Make the cell; parts that are not known are left out."""
    # A path may break behind its slashes rather than anywhere.
    *folders, last = where.split("/")
    path = join([(folder, "/", tag("wbr")) for folder in folders], last)
    return tag(
        "div",
        code(name) if name else "",
        tag("div", path, class_="path") if where else "",
        tag("div", source, class_="source") if source else "",
        class_="op",
    )
