"""A report as one self-contained page."""

from .page import render_html as render_html
from .page import write_html as write_html

__all__ = ["render_html", "write_html"]
