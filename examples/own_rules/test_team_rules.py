"""Holds the team's rules to what diagnose holds its own to."""

from team_rules.logging_stall import LoggingStall

from diagnose.rules import check_rule


def test_logging_stall() -> None:
    check_rule(LoggingStall())
