"""From what a person types to options: flags made from `Config`, and mistakes told in one sentence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from fedkeel import config as configuration
from fedkeel import spec
from fedkeel.config import Config
from fedkeel.errors import FedkeelError, nearest, unknown
from fedkeel.experiments.rows import typed


class Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in one sentence with the nearest valid choice, and leaves exiting to `main`."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # An abbreviation that works today is ambiguous once another option is added.
        options.setdefault("allow_abbrev", False)
        # argparse would begin with all forty flags; they are explained one by one further down.
        if "usage" not in options and options.get("prog", "fedkeel") != "fedkeel":
            options["usage"] = "%(prog)s [options]"
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        if missing:
            message = f"'{self.prog}' lacks {missing[1]}"
        at_flag = re.fullmatch(r"argument (\S+): (.*)", message)
        if at_flag:
            message = f"{at_flag[1]} {at_flag[2]}"
        if message.endswith((".", "?")):
            raise FedkeelError(message)
        raise FedkeelError(f"{message}: see '{self.prog} --help'.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Each command's own parser refuses what it does not know, since it alone knows what is near.
        known, extra = super().parse_known_args(args, namespace)
        if extra:
            self._refuse(extra[0])
        return known, extra

    def _refuse(self, given: str) -> NoReturn:
        if given.startswith("-") and given != "-":
            flag = given.partition("=")[0]
            # Without the dashes, which all flags share and by which any two of them would be near.
            word = configuration.ELSEWHERE.get(flag.lstrip("-"), flag.lstrip("-")).replace("_", "-")
            here = [known[2:] for known in self._option_string_actions if known.startswith("--")]
            close = nearest(word, here)
            if word in ("method", "methods") and any(action.dest == "methods" for action in self._actions):
                ending = f"methods have no flag, as in '{self.prog} fedavg greg'."
            elif word.replace("-", "_") in configuration.option_names() and not {word, f"{word}s"} & set(here):
                ending = f"it is one of 'fedkeel run'; see '{self.prog} --help'."
            elif close.startswith("did"):
                ending = re.sub(r"'(\w)", r"'--\1", close)
            else:  # all sixty flags are no help when none is near
                ending = f"see '{self.prog} --help'."
            raise FedkeelError(f"'{self.prog}' has no option '{flag}': {ending}")
        ending = f"did you mean '--method {given}'?" if "--method" in self._option_string_actions else ""
        raise FedkeelError(
            f"'{self.prog}' does not know what to do with '{given}': {ending or f'''see '{self.prog} --help'.'''}"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            raise argparse.ArgumentError(None, unknown(kind, str(value), [str(choice) for choice in action.choices]))


def add_options(
    parser: argparse.ArgumentParser, *, without: Iterable[str] = (), only: Iterable[str] = (), default: str = ""
) -> None:
    """A flag for each option of `Config`, under its heading and with its default, or with what `default` says."""
    hints = get_type_hints(Config)
    groups: dict[str, Any] = {}
    for entry in fields(Config):
        if entry.name in set(without) or (only and entry.name not in set(only)):
            continue
        heading = entry.metadata["group"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        flag = "--" + entry.name.replace("_", "-")
        hint = hints[entry.name]
        text = entry.metadata["help"].replace("%", "%%")
        if hint is bool:
            action: Any = argparse.BooleanOptionalAction
            groups[heading].add_argument(
                flag, dest=entry.name, action=action, default=None, help=f"{text} (default: {default or 'no'})"
            )
            continue
        usual = default or (f"{entry.default}" if entry.default != "" else "none")
        groups[heading].add_argument(flag, dest=entry.name, metavar=metavar(hint), help=f"{text} (default: {usual})")


def add_sources(parser: argparse.ArgumentParser, *, config: bool = True) -> None:
    """Where options come from besides their flags."""
    if config:
        parser.add_argument("--config", metavar="FILE", help="read options from a TOML file; flags come on top")
    parser.add_argument("--root", metavar="DIR", help="short for --data 'NAME(root=DIR)'")


def metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return {int: "N", float: "X"}.get(hint, "TEXT")


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that the file and the flags set, the flags on top, with `--root` inside the data set's brackets."""
    path = getattr(arguments, "config", None)
    options = configuration.read(path) if path else {}
    for entry in fields(Config):
        value = getattr(arguments, entry.name, None)
        if value is not None:
            options[entry.name] = typed(entry.name, value)
    if getattr(arguments, "root", None) is not None:
        options["data"] = with_root(str(options.get("data", "folder")), arguments.root)
    return options


def with_root(data: str, root: str) -> str:
    """The data set's text with `root` among its options.

    >>> with_root("folder(size=64)", "./images")
    "folder(size=64, root='./images')"
    """
    parsed = spec.parse(data)
    if "root" in parsed.options:
        raise FedkeelError(f"The root is given twice, in '{data}' and as '{root}': keep one.")
    return str(spec.Spec(parsed.name, {**parsed.options, "root": root}))


def examples(lines: Sequence[str]) -> str:
    """The end of a command's `--help`."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)
