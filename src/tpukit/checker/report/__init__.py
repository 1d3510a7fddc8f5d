"""Reports of a check for other places than the terminal: a page, a trace, a comparison."""

from .build import build_report as build_report
from .changes import Change as Change
from .changes import compare_reports as compare_reports
from .comparison import Comparison as Comparison
from .comparison import ToolchainCheck as ToolchainCheck
from .diff import ReportDiff as ReportDiff
from .diff import diff_reports as diff_reports
from .html import write_comparison as write_comparison
from .html import write_html as write_html
from .perfetto import write_perfetto as write_perfetto
from .schema import SCHEMA as SCHEMA
from .schema import RecordedStep as RecordedStep
from .schema import Report as Report
from .schema import read_report as read_report

__all__ = [
    "SCHEMA",
    "Change",
    "Comparison",
    "RecordedStep",
    "Report",
    "ReportDiff",
    "ToolchainCheck",
    "build_report",
    "compare_reports",
    "diff_reports",
    "read_report",
    "write_comparison",
    "write_html",
    "write_perfetto",
]
