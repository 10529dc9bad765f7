"""What is installed beside Fedkeel: no file unknown, no major version untried."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"[A-Za-z0-9._-]+==[^ ;]+")


def entries() -> list[str]:
    """Of constraints.txt, each with its hashes on one line."""
    text = (ROOT / "constraints.txt").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [entry for extra in project["optional-dependencies"].values() for entry in extra]
    return [entry for entry in project["dependencies"] + optional if not entry.startswith("fedkeel[")]


def test_every_dependency_is_held_to_one_version_and_to_the_hashes_of_its_files() -> None:
    assert len(entries()) > 100
    for entry in entries():
        assert PIN.match(entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry


@pytest.mark.parametrize("requirement", declared())
def test_a_dependency_has_a_lower_bound_and_ends_before_a_major_version_that_nobody_has_tried(requirement: str) -> None:
    assert re.search(r">=[^,;]+,<\d+|==\d+\.\d+\.\*", requirement.partition(";")[0])


def test_every_declared_dependency_is_among_those_that_are_held() -> None:
    held = {re.split("==", entry)[0].lower().replace("_", "-") for entry in entries()}
    for requirement in declared():
        name = re.split(r"[\[><=]", requirement)[0].lower()
        assert name in held or name in {"mlflow"}, requirement  # mlflow is an extra that no test needs
