"""Reports of a check: as data, HTML page, trace and comparison."""

from .build import build_report as build_report
from .changes import Change as Change
from .changes import compare_reports as compare_reports
from .comparison import Comparison as Comparison
from .comparison import ReportDiff as ReportDiff
from .comparison import ToolchainCheck as ToolchainCheck
from .comparison import diff_reports as diff_reports
from .html import write_comparison as write_comparison
from .html import write_html as write_html
from .perfetto import write_perfetto as write_perfetto
from .schema import SCHEMA as SCHEMA
from .schema import Report as Report
from .schema import read_report as read_report
from .schema import spans_of as spans_of
from .schema import step_title as step_title

__all__ = [
    "SCHEMA",
    "Change",
    "Comparison",
    "Report",
    "ReportDiff",
    "ToolchainCheck",
    "build_report",
    "compare_reports",
    "diff_reports",
    "read_report",
    "spans_of",
    "step_title",
    "write_comparison",
    "write_html",
    "write_perfetto",
]
