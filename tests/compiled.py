"""Fixtures for tests that compile: graphs that no other test has left, and none that take C++."""

from __future__ import annotations

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
