"""Kinds of statements and expressions that are asked for together."""

from __future__ import annotations

import ast

ForLoop = ast.For | ast.AsyncFor
Loop = ast.For | ast.AsyncFor | ast.While
With = ast.With | ast.AsyncWith
Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
Definition = ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
Separate = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
"""What the statements of which are not those of the function that it stands in."""
