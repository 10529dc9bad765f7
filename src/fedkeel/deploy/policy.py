"""What a site lets a server ask of it: `fedkeel join --accept policy.toml`.

A server is a stranger. What it names is held against the site's policy with every message anew. The fields below are
the only list of what a policy can say: the file, the checks and the printed default are made from them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedkeel.config import read_table
from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import Count, NotNegative, check_fields

STRENGTH = ("none", "central", "local")
DELTA = 1e-5  # at which a site counts epsilon


def line(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Policy:
    """The most that a site does for a server. The defaults let every method through."""

    methods: str = line("", "those that it may ask for, separated by commas; every one where none is named")
    rounds: Count = line(10_000, "most rounds of a run")
    samples: Count = line(1, "fewest images that a run may train on, or test on: one alone would show")
    evaluation: bool = line(True, "tell accuracy and loss on the test and validation images")
    by_class: bool = line(True, "tell the same by class: how many test images of each are taken for each other")
    dp: Literal["none", "central", "local"] = line(
        "none", "differential privacy, at least: 'local' does not rely on the server, 'central' does"
    )
    epsilon: NotNegative = line(0.0, f'with dp = "local", most that a run may spend at delta = {DELTA:g}; 0: no limit')

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epsilon and self.dp != "local":
            raise FedkeelError("'epsilon' does nothing without 'dp = \"local\"': give both.")

    @staticmethod
    def read(path: Path) -> Policy:
        """From a TOML file; what it does not say is as in the default policy."""
        table, _ = read_table(path, "policy")
        known = [entry.name for entry in fields(Policy)]
        for name in table:
            if name not in known:
                raise FedkeelError(f"There is no '{name}' in a policy: {nearest(name, known)}")
        return Policy(**table)

    def to_toml(self) -> str:
        lines = ["# What a site of Fedkeel accepts: 'fedkeel join KIT --data DIR --accept THIS'.", ""]
        lines += [f"{self.text(entry.name)}  # {entry.metadata['help']}" for entry in fields(self)]
        return "\n".join(lines) + "\n"

    def text(self, name: str) -> str:
        return f"{name} = {json.dumps(getattr(self, name))}"

    def require(self, name: str, fits: bool, asked: str) -> None:
        """Refuse what was asked for unless it fits this line."""
        if not fits:
            raise FedkeelError(f"its policy has '{self.text(name)}', and it is asked for {asked}")
