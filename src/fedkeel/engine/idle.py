"""Options that are set and do nothing, as `dp_noise` without `dp`: refused once, where a run is asked for.

What an option needs is declared with it, in `Config`. Here stands what a run comes to, so that it can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from fedkeel import methods, options, spec
from fedkeel.config import PYTHON_OBJECT, Config
from fedkeel.core.composition import Composition
from fedkeel.engine import metrics, optimizers
from fedkeel.engine.executors.executor import choose_executor, runs_elsewhere
from fedkeel.engine.setup import choose_device
from fedkeel.errors import FedkeelError
from fedkeel.trust.robust import Defence

# The hooks of a method that may ask what a client counts for.
WEIGHING = ("before_training", "weights", "statistics", "extras", "before_evaluation")


def idle(config: Config, *, network: bool = False, typed: Collection[str] = ()) -> dict[str, str]:
    """These options, each with the sentence that refuses it; `network`: clients are sites with their own devices.
    `typed`: set by hand, also where that is the default."""
    metrics.asked(config)  # a name that there is not is told of first
    executor, device = "", ""
    if not network:
        here = choose_device(config)
        executor, device = choose_executor(config, here), config.device if runs_elsewhere(config) else here.type
    by_name = config.data != PYTHON_OBJECT and not network  # a network goes by both the brackets and the option
    method = None
    if config.method != PYTHON_OBJECT:
        with suppress(FedkeelError):  # told of where it is built: other cells of a table can still be run
            method = Composition.of(methods.build(config.method))
    facts = {
        "pooled": method is not None and method.is_pooled,
        "weighed": method is None or (not method.is_pooled and clients_are_weighed(config, method)),
        "personal": method is None or method.may_be_personal,
        "network": network,
        "executor": executor,
        "device": device,
        "taken": {*optimizers.chosen(config)[1]},
        "inside": spec.parse(config.data).options if by_name else {},
    }
    return options.idle(config, SimpleNamespace(**{**config.to_dict(), **facts}), typed)


def clients_are_weighed(config: Config, method: Composition) -> bool:
    """Whether `weighting` has an effect: in the mean of the updates, or in a rule of the method's own."""
    if any("shares" in part.traits.replaces for part in method.parts):
        return False
    with suppress(FedkeelError):  # told of where the rules are made
        return any(map(method.overrides, WEIGHING)) or not any(rule.alike for rule in Defence.of(config.robust).rules)
    return True


def refuse_idle(config: Config, names: Collection[str] | None = None, *, network: bool = False) -> None:
    """`names`: only these were asked for now, the others long ago."""
    for name, sentence in idle(config, network=network).items():
        if names is None or name in names:
            raise FedkeelError(sentence)


def refuse_typed(configs: Iterable[Config], flags: Mapping[str, Any]) -> None:
    """Of a command's flags the first that does nothing in any of its runs, though it says no more than the default."""
    found = [idle(config, typed=[name for name, value in flags.items() if value]) for config in configs]
    for name in flags:
        if found and all(name in sentences for sentences in found):
            raise FedkeelError(found[0][name])


def without_idle(config: Config) -> Config:
    """The same run without them."""
    return config.replace(**{name: getattr(Config, name) for name in idle(config)})


def settled(configs: Mapping[Any, Config], own: Callable[[Any], Collection[str]] = lambda _: ()) -> dict[Any, Config]:
    """The rows of a comparison without them: what is set for all may be of some. Refused is what is of none, and what a
    row sets of its `own`, by its label."""
    found = {label: idle(config) for label, config in configs.items()}
    for label, sentences in found.items():
        for name, sentence in sentences.items():
            value = getattr(configs[label], name)
            used = any(name not in found[other] and getattr(configs[other], name) == value for other in configs)
            if not used or name in own(label):
                raise FedkeelError(sentence)
    return {label: without_idle(config) for label, config in configs.items()}
