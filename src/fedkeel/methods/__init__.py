"""The methods, one file each. `build("fedprox(mu=0.1)+greg")` makes one, or several composed.

What a method's file is written with is here too: `from fedkeel.methods import Batch, LocalClient, Method, ...`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from fedkeel.core.checking import Expected
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import described
from fedkeel.registry import Registry, discover
from fedkeel.spec import parse_sum

__all__ = [
    "METHODS", "Batch", "Expected", "LocalClient", "Method", "Output", "Server", "Tensors", "Traits", "Update", "build",
    "register",
]  # fmt: skip

METHODS: Registry[Method] = Registry("method")
"""The methods by name, those of your own too."""
M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Class decorator: make a `Method` known under `name`, to the command line too.

    >>> @register("damped-example")
    ... class Damped(Method):
    ...     'Goes half of the way to the mean.'
    >>> build("damped-example+fedprox(mu=0.1)").name
    'damped-example+fedprox'
    """

    if not isinstance(name, str):
        raise FedkeelError(f"'register' is given {described(name)}: write @register('name') above the class.")

    def remember(method: M) -> M:
        if not isinstance(method, type) or not issubclass(method, Method):
            raise FedkeelError(f"The method '{name}' is {described(method)}: derive a class from fedkeel.Method.")
        method.name = name
        return METHODS.register(name)(method)

    return remember


def build(text: str, **options: Any) -> Method:
    """A method from its name, or a composition from several joined by `+`.

    Options are given in brackets, `build("fedprox(mu=0.1)+gn")`, or by keyword, for the one part that has such an
    option.

    >>> build("fedprox", mu=0.1).mu
    0.1
    """
    parts = [(METHODS.entry(spec.name), dict(spec.options)) for spec in parse_sum(text)]
    for name, value in options.items():
        owners = {entry.name: given for entry, given in parts if name in entry.options()}
        if not owners:
            known = [option for entry, _ in parts for option in entry.options()]
            raise FedkeelError(f"'{text}' has no option '{name}': {nearest(name, known)}")
        if len(owners) > 1:
            both = " and ".join(f"'{owner}'" for owner in owners)
            raise FedkeelError(f"The option '{name}' belongs to {both}: write it in brackets, NAME({name}=...).")
        next(iter(owners.values()))[name] = value
    methods = [METHODS.make(entry.name, **given) for entry, given in parts]
    return methods[0] if len(methods) == 1 else Composition(methods)


discover(__name__)
