"""Text of the script's files, as it was when they ran."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path


class Sources:
    """Source text by file, read and parsed once.

    Args:
        texts: Texts that are known already: those kept with the run. The file may be another by now.
    """

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts: dict[str, str | None] = dict(texts or {})
        self._trees: dict[str, ast.Module | None] = {}

    def know(self, texts: Mapping[str, str]) -> None:
        """Takes in what is kept with one more rank."""
        self._texts.update((file, text) for file, text in texts.items() if file not in self._texts)

    def text(self, file: str) -> str | None:
        """Returns the text of a file, or `None` when it cannot be read."""
        if file not in self._texts:
            try:
                self._texts[file] = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                self._texts[file] = None
        return self._texts[file]

    def line(self, file: str, line: int) -> str:
        """Returns one line without its indentation, or an empty text."""
        lines = (self.text(file) or "").split("\n")  # not `splitlines`, which ends one at a form feed
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    def tree(self, file: str) -> ast.Module | None:
        """Returns the parsed file, or `None` when it is not Python.

        It is one tree for all who ask: none may change it.
        """
        if file not in self._trees:
            text = self.text(file)
            try:
                self._trees[file] = None if text is None else ast.parse(text)
            except (SyntaxError, ValueError):
                self._trees[file] = None
        return self._trees[file]
