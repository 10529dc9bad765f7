"""CONTRIBUTING shows files that are there, and shows them as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section(title: str) -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(title: str) -> list[str]:
    """The Python blocks of a section."""
    return re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)


def test_the_method_that_is_shown_whole_is_the_file() -> None:
    assert code("Add a method in one file") == [(ROOT / "src" / "fedkeel" / "methods" / "fedprox.py").read_text()]
