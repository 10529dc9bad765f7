"""Whether the objects that a run is given in Python are of the kind it needs, before anything is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedkeel import methods, spec
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.observer import Observer
from fedkeel.options import described
from fedkeel.registry import Entry


def check_objects(federation: Any, model: Any, method: Any, observer: Any) -> None:
    """One sentence for what is something else; None is what was not given."""
    if federation is not None and not isinstance(federation, Federation):
        ending = (
            f"a data set that has a name is given as data={federation!r}."
            if isinstance(federation, str)
            else "give a fedkeel.data.Federation, which has clients, or folders of images, data='folder(root=...)'."
        )
        raise FedkeelError(f"'federation' is {described(federation)}: {ending}")
    if model is not None and not isinstance(model, nn.Module):
        _refuse("model", model, nn.Module, "a network")
    if method is not None and not isinstance(method, Method):
        _refuse("method", method, Method, "a fedkeel.Method")
    if observer is not None and not isinstance(observer, Observer):
        _refuse("observer", observer, Observer, "an object of a class derived from fedkeel.Observer")


def _refuse(what: str, given: Any, kind: type, wanted: str) -> None:
    if isinstance(given, type) and issubclass(given, kind):
        ending = f"give an object of it, {given.__name__}(...)."
    elif isinstance(given, Entry):
        ending = f"give its name, {what}='{given.name}'."
    elif isinstance(given, list | tuple) and what == "method":
        ending = "join several by '+', like 'fedprox+gn', or compare them with fedkeel.compare."
    else:
        ending = f"give {wanted}{'' if what == 'observer' else ', or its name'}."
    raise FedkeelError(f"'{what}' is {described(given)}: {ending}")


def refuse_name(config: str | Path) -> None:
    """A method's name in the place of the configuration, which is the first thing that `simulate` takes."""
    if Path(config).exists() or Path(config).suffix == ".toml":
        return
    try:
        known = all(part.name in methods.METHODS for part in spec.parse_sum(str(config)))
    except FedkeelError:
        known = False
    example = str(config) if known else "fedbn"
    raise FedkeelError(
        f"There is no configuration file '{config}', which is what comes first: a method is given as "
        f"method='{example}', a data set as data='digits-shift'."
    )
