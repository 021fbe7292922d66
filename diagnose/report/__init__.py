"""A Profile to text, markdown and HTML: one file per section.

Files without an underscore are sections, found by looking into this folder. Files with one render:
the end block of a run, the long text, markdown, HTML and JSON.
"""

from diagnose.report._calibration import calibration_json, calibration_text
from diagnose.report._comparison import comparison_json, comparison_text
from diagnose.report._doctor import doctor_json, doctor_text
from diagnose.report._end_block import end_block
from diagnose.report._fault_changes import FaultChanges
from diagnose.report._html import to_html
from diagnose.report._json import to_json
from diagnose.report._markdown import to_markdown
from diagnose.report._rule_pages import rule_pages, write_pages
from diagnose.report._rule_text import rule_text, rules_json, rules_text
from diagnose.report._run_list import runs_json, runs_text
from diagnose.report._status import status_json, status_text
from diagnose.report._terminal import Terminal
from diagnose.report._text import to_text

__all__ = [
    "FaultChanges",
    "Terminal",
    "calibration_json",
    "calibration_text",
    "comparison_json",
    "comparison_text",
    "doctor_json",
    "doctor_text",
    "end_block",
    "rule_pages",
    "rule_text",
    "rules_json",
    "rules_text",
    "runs_json",
    "runs_text",
    "status_json",
    "status_text",
    "to_html",
    "to_json",
    "to_markdown",
    "to_text",
    "write_pages",
]
