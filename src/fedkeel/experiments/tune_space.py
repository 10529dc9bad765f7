"""What a search tries, as people type it: `learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1, 3]`.

A name is an option of a run, which every method has, or `METHOD.OPTION`, which those have that this method is a part
of. Numbers come from `log(LOW, HIGH)`, `uniform(LOW, HIGH)` or `int(LOW, HIGH)`, both ends included; anything else from
a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeel import config as configuration
from fedkeel.config import Config
from fedkeel.errors import FedkeelError, nearest, quoted
from fedkeel.experiments.rows import own_options
from fedkeel.methods import METHODS
from fedkeel.options import described
from fedkeel.runs.run import PYTHON_OBJECT
from fedkeel.spec import literal, parse_sum, split

KINDS = ("log", "uniform", "int")
# The others say what is measured, on which data, by whom and where: a search over them would compare nothing.
TUNABLE = (
    *("model", "weights", "participation", "weighting", "dp_clip", "local_epochs", "batch_size", "drop_last", "loss"),
    *("optimizer", "learning_rate", "momentum", "weight_decay", "schedule", "clip_norm"),
)
AROUND = 10.0  # times the learning rate, up and down, where no space is given
DIGITS = 4  # of a number that is tried: more are noise, and would be in the way of whoever reads or types it
HOW = "write it like learning_rate=log(0.001, 0.3), batch_size=[16, 32] or fedprox.mu=uniform(0, 1)"
Params = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both included: evenly, by their logarithm, or whole ones."""

    kind: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.kind}({self.low!r}, {self.high!r})"

    def __contains__(self, value: object) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high  # type: ignore[operator]

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.low, self.high

    def tried(self, value: Any) -> Any:
        """A number of the range that can be read and typed."""
        rounded = value if self.kind == "int" else float(f"{value:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high)

    def edge(self, value: Any) -> str:
        """At which end of the range a value is: a twentieth of it or less away."""
        low, high, at = (math.log(n) if self.kind == "log" else n for n in (self.low, self.high, value))
        near = 0.0 if self.kind == "int" else (high - low) / 20
        return "lower" if at - low <= near else "upper" if high - at <= near else ""

    def suggest(self, trial: Any, name: str) -> None:
        """Let a trial of Optuna's draw one."""
        if self.kind == "int":
            trial.suggest_int(name, self.low, self.high)
        else:
            trial.suggest_float(name, self.low, self.high, log=self.kind == "log")


@dataclass(frozen=True)
class Choices:
    """Values one of which is taken."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(repr, self.values))}]"

    def __contains__(self, value: object) -> bool:
        return value in self.values

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values

    def tried(self, value: Any) -> Any:
        """As it stands in the list: 1 for 1.0."""
        return self.values[self.values.index(value)]

    def edge(self, value: Any) -> str:
        """Of numbers, whether it is the least or the greatest of them."""
        numbers = [v for v in self.values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) < max(3, len(self.values)):
            return ""
        return {min(numbers): "lower", max(numbers): "upper"}.get(value, "")

    def suggest(self, trial: Any, name: str) -> None:
        trial.suggest_categorical(name, self.values)


Dimension = Span | Choices
Space = dict[str, Dimension]


def read_space(given: str | Sequence[str] | Mapping[str, Any] | None) -> Space:
    """The dimensions by name, from text, several texts, or a table; whether methods have them is checked later.

    >>> read_space("learning-rate=log(0.001, 0.3)")
    {'learning_rate': Span(kind='log', low=0.001, high=0.3)}
    """
    entries: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        entries = [(str(name), value) for name, value in given.items()]
    elif isinstance(given, str) or (isinstance(given, Sequence) and all(isinstance(text, str) for text in given)):
        for item in (item for text in ([given] if isinstance(given, str) else given) for item in split(text, ",")):
            name, equals, value = item.partition("=")
            if not equals or not name.strip():
                raise FedkeelError(f"'{item.strip()}' in the space is no range of an option: {HOW}.")
            entries.append((name, value.strip()))
    elif given is not None:
        raise FedkeelError(f"'space' is {described(given)}: {HOW}, or give a table of these.")
    space: Space = {}
    for name, value in entries:
        name = name.strip().replace("-", "_") if "." not in name else name.strip()
        if name in space:
            raise FedkeelError(f"The space has '{name}' twice: keep one.")
        space[name] = read_dimension(name, value)
    return space


def read_dimension(name: str, given: Any) -> Dimension:
    if isinstance(given, str) and (found := re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", given, re.DOTALL)):
        return _span(name, found[1], [literal(end.strip()) for end in split(found[2], ",")])
    if isinstance(given, str) and given.strip().startswith("[") and given.strip().endswith("]"):
        inside = given.strip()[1:-1]
        given = [literal(part.strip()) for part in split(inside, ",")] if inside.strip() else []
    if not isinstance(given, list | tuple):
        raise FedkeelError(f"The space gives '{name}' {described(given)}: {HOW}.")
    if not given:
        raise FedkeelError(f"The list of '{name}' in the space is empty: give at least one value.")
    for place, value in enumerate(given):
        if value is not None and not isinstance(value, bool | int | float | str):
            raise FedkeelError(f"The list of '{name}' in the space has {described(value)}: give numbers or words.")
        if value in given[:place]:
            raise FedkeelError(f"The list of '{name}' in the space has {described(value)} twice: keep one.")
    return Choices(tuple(given))


def _span(name: str, kind: str, ends: Sequence[Any]) -> Span:
    text = f"{kind}({', '.join(map(str, ends))})"
    if kind not in KINDS:
        raise FedkeelError(f"The space gives '{name}' '{text}': {nearest(kind, KINDS)}")
    whole = kind == "int"
    if len(ends) != 2 or any(isinstance(e, bool) or not isinstance(e, int if whole else int | float) for e in ends):
        numbers = "whole numbers" if whole else "numbers"
        raise FedkeelError(f"The space gives '{name}' '{text}': give two {numbers}, like {kind}(1, 10).")
    low, high = ends if whole else map(float, ends)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise FedkeelError(f"The range of '{name}' in the space, {text}, is empty: give a lower and an upper end.")
    if kind == "log" and low <= 0:
        raise FedkeelError(f"The range of '{name}' in the space is {text}: 'log' needs a lower end above 0.")
    return Span(kind, low, high)


def usual_space(learning_rate: float) -> Space:
    """The learning rate, a factor of ten up and down."""
    low, high = (float(f"{rate:.{DIGITS}g}") for rate in (learning_rate / AROUND, learning_rate * AROUND))
    return {"learning_rate": Span("log", low, high)}


# -- a space and the methods ------------------------------------------------------------------------------------------
def spaces_of(space: Space, configs: Mapping[str, Config]) -> dict[str, Space]:
    """The dimensions of each row by its label; what no row could be given is refused."""
    for name in space:
        part, dot, option = name.rpartition(".")
        if dot:
            _refuse_unless_used(name, part, option, configs)
            continue
        configuration.refuse_unknown({name: None})
        if name not in TUNABLE:
            raise FedkeelError(
                f"'{name}' is in the space, but it decides what is measured, on what, or where it runs: leave it out, "
                f"and choose from {', '.join(TUNABLE)}, and METHOD.OPTION."
            )
    rows: dict[str, Space] = {}
    for label, config in configs.items():
        parts = _parts(config)
        rows[label] = {name: d for name, d in space.items() if "." not in name or name.rpartition(".")[0] in parts}
        for name, dimension in rows[label].items():
            _refuse_fixed(label, name, config)
            for value in dimension.extremes:
                check(configured(config, {name: value}), name)
    return rows


def check(config: Config, name: str) -> None:
    """That the method takes its options, where the one of this name is a method's; a `Config` has checked its own."""
    part = name.rpartition(".")[0]
    for given in parse_sum(config.method) if part else ():
        if given.name == part:
            METHODS.make(part, **given.options)


def _parts(config: Config) -> set[str]:
    return set() if config.method == PYTHON_OBJECT else {part.name for part in parse_sum(config.method)}


def _refuse_unless_used(name: str, part: str, option: str, configs: Mapping[str, Config]) -> None:
    entry = METHODS.entry(part)
    if option not in entry.options():
        ending = nearest(option, entry.options()) if entry.options() else f"'{part}' takes none."
        raise FedkeelError(f"The space has '{name}', but '{part}' has no option '{option}': {ending}")
    if not any(part in _parts(config) for config in configs.values()):
        raise FedkeelError(
            f"The space has '{name}', but '{part}' is in none of the methods {quoted(list(configs))}: add it, or leave "
            "that out."
        )


def _refuse_fixed(label: str, name: str, config: Config) -> None:
    """A row that says what it has cannot be given something else."""
    part, dot, option = name.rpartition(".")
    fixed = dot and any(s.name == part and option in s.options for s in parse_sum(config.method))
    if fixed or (config.method != PYTHON_OBJECT and name in own_options(label)):
        raise FedkeelError(
            f"'{label}' sets '{name.rpartition('.')[2]}', which is tuned: leave it out there, or out of the space."
        )
    if not dot and getattr(config, name) == PYTHON_OBJECT:
        raise FedkeelError(f"The space has '{name}', but the {name} is given as an object: leave one of them out.")


def configured(config: Config, params: Params) -> Config:
    """The row with these values; those of a method go into its brackets."""
    plain = {name: value for name, value in params.items() if "." not in name}
    if len(plain) < len(params):
        parts = parse_sum(config.method)
        for name, value in params.items():
            for part in (part for part in parts if part.name == name.rpartition(".")[0]):
                part.options[name.rpartition(".")[2]] = value
        plain["method"] = "+".join(map(str, parts))
    return config.replace(**plain)


def default_params(config: Config, space: Space) -> dict[str, Any]:
    """What a row has without a search, as far as the space has it too."""
    found: dict[str, Any] = {}
    for name, dimension in space.items():
        part, dot, option = name.rpartition(".")
        value = METHODS.entry(part).options()[option].default if dot else getattr(config, name)
        if value in dimension:
            found[name] = dimension.tried(value)
    return found


def row_label(label: str, config: Config, params: Params) -> str:
    """The row with these values as one types it, `fedprox(mu=0.03)@learning_rate=0.0123`."""
    method = label if config.method == PYTHON_OBJECT else configured(config, params).method
    own = {} if config.method == PYTHON_OBJECT else dict[str, Any](own_options(label))
    own |= {name: value for name, value in params.items() if "." not in name}
    return f"{method}@{','.join(f'{name}={value}' for name, value in own.items())}".rstrip("@")
