"""Fixtures for tests that compile: what other tests have compiled is gone, and nothing takes C++."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diagnose.actions._compiled import Compiler


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo as it is, and graphs that run in eager mode: no C++ is compiled."""

    def backend(self: Compiler, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return graph

    monkeypatch.setattr(Compiler, "_backend", backend)


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled counts no operations, and tests that ran before may have."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "counters", defaultdict(Counter))
