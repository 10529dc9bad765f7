"""What a search tries, as people type it: `learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1, 3]`.

A name is an option of a run, which every method has, or `METHOD.OPTION`, which those have that this method is a part
of. Numbers come from `log(LOW, HIGH)`, `uniform(LOW, HIGH)` or `int(LOW, HIGH)`, both ends included; anything else from
a list. Each is a distribution of Optuna's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from fedkeel import config as configuration
from fedkeel import methods
from fedkeel.config import Config
from fedkeel.errors import FedkeelError, nearest, quoted
from fedkeel.experiments.rows import own_options
from fedkeel.methods import METHODS
from fedkeel.options import described
from fedkeel.runs.run import PYTHON_OBJECT
from fedkeel.spec import literal, parse_sum, split

Space = dict[str, BaseDistribution]
# The others say what is measured, on which data, by whom and where: a search over them would compare nothing.
TUNABLE = (
    *("model", "weights", "participation", "weighting", "dp_clip", "local_epochs", "batch_size", "drop_last", "loss"),
    *("optimizer", "learning_rate", "momentum", "weight_decay", "schedule", "clip_norm"),
)
AROUND = 10.0  # times the learning rate, up and down, where no space is given
DIGITS = 4  # of a number that is tried: more are noise
HOW = "write it like learning_rate=log(0.001, 0.3), batch_size=[16, 32] or fedprox.mu=uniform(0, 1)"


def read_space(given: str | Sequence[str] | Mapping[str, Any] | None, learning_rate: float) -> Space:
    """The distributions by name, from text, several texts, or a table; without any, the learning rate, a factor of ten
    up and down. Whether methods have them is checked later."""
    if given is None:
        return {
            "learning_rate": FloatDistribution(short(learning_rate / AROUND), short(learning_rate * AROUND), log=True)
        }
    entries: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        entries = [(str(name), value) for name, value in given.items()]
    else:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise FedkeelError(f"'space' is {described(given)}: {HOW}, or give a table of these.")
        for item in (item for text in texts for item in split(text, ",")):
            name, _, value = item.partition("=")
            entries.append((name.strip(), value.strip()))
    space: Space = {}
    for name, value in entries:
        name = name if "." in name else name.replace("-", "_")
        if name in space:
            raise FedkeelError(f"The space has '{name}' twice: keep one.")
        try:
            space[name] = distribution(value)
        except (ValueError, TypeError) as error:
            raise FedkeelError(f"The space gives '{name}' {described(value)}: {HOW}.") from error
    return space


def distribution(given: Any) -> BaseDistribution:
    """Of a text or a list; a ValueError where it is none."""
    if isinstance(given, str) and (found := re.fullmatch(r"(log|uniform|int)\(([^,]+),([^,]+)\)", given)):
        low, high = (literal(end.strip()) for end in (found[2], found[3]))
        whole = found[1] == "int"
        if not low < high or not math.isfinite(high) or (whole and not isinstance(low + high, int)):
            raise ValueError(given)
        if whole:
            return IntDistribution(low, high)
        return FloatDistribution(float(low), float(high), log=found[1] == "log")
    if isinstance(given, str) and given.startswith("[") and given.endswith("]"):
        given = [literal(part.strip()) for part in split(given[1:-1], ",")]
    if not isinstance(given, list | tuple) or not all(isinstance(value, bool | int | float | str) for value in given):
        raise ValueError(given)
    return CategoricalDistribution(given)


def shown(found: BaseDistribution) -> str:
    """As it is typed."""
    if isinstance(found, CategoricalDistribution):
        return f"[{', '.join(map(repr, found.choices))}]"
    assert isinstance(found, FloatDistribution | IntDistribution)
    kind = "int" if isinstance(found, IntDistribution) else "log" if found.log else "uniform"
    return f"{kind}({found.low!r}, {found.high!r})"


def ends(found: BaseDistribution) -> tuple[Any, ...]:
    """The values to try out beforehand: the ends of a range, all of a list."""
    if isinstance(found, CategoricalDistribution):
        return tuple(found.choices)
    assert isinstance(found, FloatDistribution | IntDistribution)
    return found.low, found.high


def short(value: Any) -> Any:
    """A number that can be read and typed."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# -- a space and the methods ------------------------------------------------------------------------------------------
def spaces_of(space: Space, configs: Mapping[str, Config]) -> dict[str, Space]:
    """The distributions of each row by its label; what no row could be given is refused."""
    parts = {
        label: () if c.method == PYTHON_OBJECT else tuple(p.name for p in parse_sum(c.method))
        for label, c in configs.items()
    }
    for name in space:
        part, dot, option = name.rpartition(".")
        if not dot:
            configuration.refuse_unknown({name: None})
            if name not in TUNABLE:
                raise FedkeelError(
                    f"'{name}' is in the space, but it decides what is measured, on what, or where it runs: leave it "
                    f"out, and choose from {', '.join(TUNABLE)}, and METHOD.OPTION."
                )
        elif option not in (known := METHODS.entry(part).options()):
            raise FedkeelError(f"The space has '{name}', but '{part}' has no such option: {nearest(option, known)}")
        elif not any(part in names for names in parts.values()):
            raise FedkeelError(
                f"The space has '{name}', but '{part}' is in none of the methods {quoted(list(configs))}: leave it out."
            )
    rows = {}
    for label, config in configs.items():
        rows[label] = {n: d for n, d in space.items() if "." not in n or n.rpartition(".")[0] in parts[label]}
        for name, found in rows[label].items():
            _refuse_fixed(label, name, config)
            for value in ends(found):
                tried = configured(config, {name: value})
                if "." in name:
                    methods.build(tried.method)
    return rows


def _refuse_fixed(label: str, name: str, config: Config) -> None:
    """A row that says what it has cannot be given something else."""
    part, dot, option = name.rpartition(".")
    fixed = dot and any(s.name == part and option in s.options for s in parse_sum(config.method))
    if fixed or (config.method != PYTHON_OBJECT and name in own_options(label)):
        raise FedkeelError(f"'{label}' sets '{option}', which is tuned: leave it out there, or out of the space.")
    if not dot and getattr(config, name) == PYTHON_OBJECT:
        raise FedkeelError(f"The space has '{name}', but the {name} is given as an object: leave one of them out.")


def configured(config: Config, params: Mapping[str, Any]) -> Config:
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
    for name, one in space.items():
        part, dot, option = name.rpartition(".")
        value = METHODS.entry(part).options()[option].default if dot else getattr(config, name)
        if isinstance(one, CategoricalDistribution):
            found.update((name, choice) for choice in one.choices if choice == value)
        elif isinstance(value, int | float) and ends(one)[0] <= value <= ends(one)[1]:
            found[name] = value
    return found


def row_label(label: str, config: Config, params: Mapping[str, Any]) -> str:
    """The row with these values as one types it, `fedprox(mu=0.03)@learning_rate=0.0123`."""
    method = label if config.method == PYTHON_OBJECT else configured(config, params).method
    own = {} if config.method == PYTHON_OBJECT else dict[str, Any](own_options(label))
    own |= {name: value for name, value in params.items() if "." not in name}
    return f"{method}@{','.join(f'{name}={value}' for name, value in own.items())}".rstrip("@")
