"""The commands that repeat runs, complete: what differs from the defaults is in them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from fedkeel.config import Config
from fedkeel.core.readable import shell
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import SET_BY_COMPARISON, own_options, read_method
from fedkeel.runs.run import given_in_python
from fedkeel.runs.store import fingerprint

# Parallel jobs of a comparison set the executor themselves, and it does not change what comes out.
LEFT_TO_COMPARISON = (*SET_BY_COMPARISON, "executor", "workers")


def run_command(config: Config) -> str | None:
    """The command of one run; None for one that was made with objects given in Python."""
    if given_in_python(config):
        return None
    return shell(["fedkeel", "run", *flags(config)])


def compare_command(configs: Mapping[str, Sequence[Config]]) -> str | None:
    """The command of a comparison, from the configurations of each row by its label; None where there is none."""
    every = [config for group in configs.values() for config in group]
    seeds = {tuple(sorted(config.seed for config in group)) for group in configs.values()}
    if len(seeds) != 1 or any(given_in_python(config) for config in every):
        return None
    names = [entry.name for entry in fields(Config) if entry.name not in LEFT_TO_COMPARISON]
    common = {}
    try:
        own = {label: own_options(label) for label in configs}
        for name in names:
            values = {str(getattr(g[0], name)): g[0] for label, g in configs.items() if name not in own[label]}
            if len(values) == 1:
                common[name] = getattr(next(iter(values.values())), name)
        again = {label: read_method(label, common) for label in configs}
    except FedkeelError:
        return None
    if any(
        fingerprint(again[label].replace(seed=c.seed)) != fingerprint(c) for label in configs for c in configs[label]
    ):
        return None
    shared = flags(Config().replace(**common))
    return shell(["fedkeel", "compare", *configs, "--seeds", _seeds(next(iter(seeds))), *shared])


def flags(config: Config) -> list[str]:
    words: list[str] = []
    for entry in fields(Config):
        value, flag = getattr(config, entry.name), "--" + entry.name.replace("_", "-")
        if value == entry.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif str(value).startswith("-"):
            words.append(f"{flag}={value}")  # else it would be taken for a flag
        else:
            words += [flag, str(value)]
    return words


def _seeds(seeds: Sequence[int]) -> str:
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")
