"""A Profile to findings: one file per fault.

A package of rules of one's own needs three names from here: `Rule` to subclass, `profile` to write examples
with, and `check_rule` for its tests.
"""

from diagnose.rules._engine import ask_one, built_in, diagnosed, find_rule, rules
from diagnose.rules._examples import profile
from diagnose.rules._own import own_rules
from diagnose.rules._testing import check_rule
from diagnose.rules.base import WORTH_SHARE, Rule

__all__ = [
    "WORTH_SHARE",
    "Rule",
    "ask_one",
    "built_in",
    "check_rule",
    "diagnosed",
    "find_rule",
    "own_rules",
    "profile",
    "rules",
]
