"""The rows of a comparison as a person types them: `fedwon@learning_rate=0.1,batch_size=8`, seeds, folder names.

Nothing here waits for torch, so that a mistake in typing is told at once.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_type_hints

from fedkeel import config as configuration
from fedkeel.config import Config
from fedkeel.core.naming import slug
from fedkeel.errors import FedkeelError
from fedkeel.options import described
from fedkeel.spec import split

SET_BY_COMPARISON = ("method", "seed")
# What the pilot of an advice sets itself, or has no use for.
SET_BY_ADVICE = (
    *("method", "rounds", "evaluate_every", "evaluate_with", "result", "select_by", "patience", "min_delta"),
    *("evaluate_on", "site_images", "site_prior", "site_always"),
    *("metrics", "predictions", "record", "record_every"),
)


def typed(option: str, text: Any) -> Any:
    """The text of an option as the kind of value it takes; `Config` refuses what cannot be read so."""
    hint = get_type_hints(Config).get(option) if isinstance(text, str) else None
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    with suppress(ValueError):
        return hint(text) if hint in (int, float) else text
    return text


def own_options(text: str) -> dict[str, str]:
    """What a row sets for itself, after its `@`, as it is typed.

    >>> own_options("fedbn@learning-rate=0.1")
    {'learning_rate': '0.1'}
    """
    _, *rest = split(text, "@")
    own: dict[str, str] = {}
    for item in split("@".join(rest), ",") if rest else []:
        name, equals, value = item.partition("=")
        if not equals:
            raise FedkeelError(f"'{item}' in '{text}' is not an option: write it like 'fedavg@learning_rate=0.1'.")
        own[name.strip().replace("-", "_")] = value.strip()
    return own


def read_method(text: str, options: dict[str, Any]) -> Config:
    """The configuration of one row, its seed left open: the options of all rows, and its own after the `@`.

    >>> read_method("fedbn@learning_rate=0.1", {"rounds": 5}).learning_rate
    0.1
    """
    method, own = split(text, "@")[0], dict[str, Any]()
    for name, value in own_options(text).items():
        if name in SET_BY_COMPARISON:
            raise FedkeelError(f"'{text}' sets '{name}', which a comparison sets itself: leave it out.")
        configuration.refuse_unknown({name: value})
        own[name] = typed(name, value)
    for name in SET_BY_COMPARISON:
        if name in options:
            raise FedkeelError(f"'{name}' is set for all runs, but a comparison sets it itself: leave it out.")
    return configuration.from_dict({**options, **own, "method": method.strip()})


def read_methods(texts: Sequence[str], options: dict[str, Any]) -> dict[str, Config]:
    """The configuration of each row by its label, which is its text."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise FedkeelError(f"What to compare is {described(texts)}: give a list of methods, like ['fedavg', 'fedbn'].")
    configs: dict[str, Config] = {}
    for text in texts:
        if not isinstance(text, str):
            raise FedkeelError(
                f"What to compare has {described(text)} in it: give methods, by name, like 'fedprox(mu=0.1)', or as "
                "objects of a fedkeel.Method."
            )
        if slug(text) in map(slug, configs):
            raise FedkeelError(f"'{text}' is given twice: keep one.")
        configs[text] = read_method(text, options)
    return configs


def read_seeds(seeds: int | str | Sequence[int]) -> list[int]:
    """`3` is that many seeds, from 0; `"0,1,5"` or `[0, 1, 5]` are these."""
    if isinstance(seeds, str):
        parts = [part.strip() for part in seeds.split(",") if part.strip()]
        if not parts or not all(part.isdigit() for part in parts):
            raise FedkeelError(f"'seeds' is '{seeds}': give a number of seeds, like 3, or the seeds, like 0,1,5.")
        seeds = [int(part) for part in parts] if "," in seeds else int(parts[0])
    numbers: Any = range(seeds) if type(seeds) is int else seeds
    whole = isinstance(numbers, Sequence) and all(type(seed) is int and seed >= 0 for seed in numbers)
    if not whole or not numbers or len({*numbers}) < len(numbers):
        raise FedkeelError(
            f"'seeds' is {described(seeds)}: give how many, at least 1, or which, different whole numbers, like [0, 1]."
        )
    return list(numbers)
