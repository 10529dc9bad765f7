"""What to compare, where some of it is given as Python objects in place of names."""

from collections.abc import Sequence
from typing import Any

from fedkeel.config import Config
from fedkeel.core.method import Method
from fedkeel.engine.checks import check_objects, refuse_unused
from fedkeel.experiments.rows import read_methods
from fedkeel.runs.origin import identify
from fedkeel.runs.run import PYTHON_OBJECT


def read_objects(
    methods: Sequence[str | Method], options: dict[str, Any]
) -> tuple[dict[str, Config], dict[str, dict[str, Any]]]:
    """The configuration of each row by its label, and the objects that take the place of names in it."""
    shared = {"federation": options.pop("federation", None)}
    if not isinstance(options.get("model", ""), str):
        shared["model"] = options.pop("model")
    check_objects(**shared)
    shared = {name: thing for name, thing in shared.items() if thing is not None}
    labels: Any = methods
    if isinstance(methods, Sequence) and not isinstance(methods, str):
        labels = [identify(method)["name"] if isinstance(method, Method) else method for method in methods]
    configs, given = read_methods(labels, options), dict[str, dict[str, Any]]()
    for (label, config), method in zip(configs.items(), methods, strict=True):
        refuse_unused(config.to_dict(), **shared)
        given[label] = {**shared, **({"method": method} if isinstance(method, Method) else {})}
        named = ["data" if name == "federation" else name for name in given[label]]
        configs[label] = config.replace(**dict.fromkeys(named, PYTHON_OBJECT))
    return configs, given
