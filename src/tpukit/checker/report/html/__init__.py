"""A report as one self-contained page."""

from .comparison import render_comparison as render_comparison
from .comparison import write_comparison as write_comparison
from .page import render_html as render_html
from .page import write_html as write_html

__all__ = ["render_comparison", "render_html", "write_comparison", "write_html"]
