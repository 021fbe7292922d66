"""A Profile to findings: one file per fault."""

from diagnose.rules._engine import diagnosed

__all__ = ["diagnosed"]
