"""From what a person types to options: flags made from `Config`, and a mistake in one sentence."""

import argparse
import inspect
import re
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import fields
from typing import Any, NoReturn, get_args, get_type_hints

from fedkeel import config as configuration
from fedkeel import spec
from fedkeel.config import Config
from fedkeel.errors import FedkeelError, nearest, unknown
from fedkeel.experiments.rows import read_seeds, typed
from fedkeel.options import Decay, checked
from fedkeel.runs.trackers import TRACKERS, require

Arguments = argparse.Namespace
SEEDS = "how many, or which, like 0,1,5"
TRACK = "send the curves to a tracker too, as they grow"
IMPORT = "a Python file that registers methods, models, ... of your own; may be given again"
JOBS = "runs at the same time (default: one per core; on a GPU 1; under ray as many as the cluster has room for)"


def whole(name: str, least: int) -> Callable[[str], int]:
    """The type of a flag that takes a whole number."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise FedkeelError(f"'{name}' is '{text}': give a whole number, at least {least}.")
        return int(text)

    return read


def share(text: str) -> float:
    """The type of a flag that takes a share of files, not all of them."""
    with suppress(ValueError):
        return float(checked(float(text), Decay, "'tolerate'"))
    raise FedkeelError(f"'tolerate' is '{text}': give a share, such as 0.05.")


# Flags that several commands have.
METRIC = "what the table is of: accuracy, balanced-accuracy, f1, auc, ece, ... (default: accuracy)"
SHARED: dict[str, dict[str, Any]] = {
    "--metric": {"metavar": "NAME", "default": "accuracy", "help": METRIC},
    "--json": {"action": "store_true", "help": "print one JSON document"},
    "--quiet": {"action": "store_true", "help": "no progress, only warnings and the result"},
    "--track": {"metavar": "|".join(TRACKERS), "type": require, "help": TRACK},
    "--config": {"metavar": "FILE", "help": "read options from a TOML file; flags come on top"},
    "--tolerate": {"metavar": "X", "type": share, "help": "share of image files that may be broken (default: 0.01)"},
    "--root": {"metavar": "DIR", "help": "short for --data 'NAME(root=DIR)'"},
    "--seeds": {"metavar": "N", "default": "3", "type": read_seeds, "help": f"{SEEDS} (default: 3)"},
    "--import": {"metavar": "FILE", "dest": "imports", "action": "append", "default": [], "help": IMPORT},
    "--jobs": {"metavar": "N", "type": whole("jobs", 1), "help": JOBS},
}


class Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in one sentence with the nearest valid choice, and leaves exiting to `main`."""

    def __init__(self, **options: Any) -> None:
        # An abbreviation that works today is ambiguous once another option is added.
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def add_shared(self, *flags: str) -> None:
        for flag in flags:
            self.add_argument(flag, **SHARED[flag])

    def add_options(self, names: Container[str] | None = None, default: str = "") -> None:
        """A flag for each of these options of `Config`, or all, under its heading, with its default or `default`."""
        hints = get_type_hints(Config)
        groups: dict[str, Any] = {}
        heading = ""
        for entry in fields(Config):
            heading, hint = entry.metadata["heading"] or heading, hints[entry.name]
            if names is not None and entry.name not in names:
                continue
            if heading not in groups:
                groups[heading] = self.add_argument_group(heading)
            metavar = "|".join(get_args(hint)) or {int: "N", float: "X"}.get(hint, "TEXT")
            kind = {"action": argparse.BooleanOptionalAction} if hint is bool else {"metavar": metavar}
            plain = ("yes" if entry.default else "no") if hint is bool else str(entry.default) or "none"
            text = f"{entry.metadata['help'].replace('%', '%%')} (default: {default or plain})"
            groups[heading].add_argument(f"--{entry.name.replace('_', '-')}", default=None, help=text, **kind)

    def add_commands(self, *, required: bool) -> Any:
        return self.add_subparsers(title="commands", metavar="COMMAND", prog=self.prog, required=required)

    # -- mistakes ------------------------------------------------------------------------------------------------
    def error(self, message: str) -> NoReturn:
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"'{self.prog}' lacks {missing[1]}"
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise FedkeelError(message if message.endswith((".", "?")) else f"{message}: see '{self.prog} --help'.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Each command's own parser refuses what it does not know, since it alone knows what is near.
        known, extra = super().parse_known_args(args, namespace)
        if not extra:
            return known, extra
        given = extra[0]
        if given.startswith("-") and given != "-":
            flag = given.partition("=")[0]
            raise FedkeelError(f"'{self.prog}' has no option '{flag}': {self._hint(flag.lstrip('-'))}")
        has_method = "--method" in self._option_string_actions
        hint = f"did you mean '--method {given}'?" if has_method else f"see '{self.prog} --help'."
        raise FedkeelError(f"'{self.prog}' does not know what to do with '{given}': {hint}")

    def _hint(self, word: str) -> str:
        """What may have been meant by an unknown flag, given without its dashes, by which any two would be near."""
        word = word.replace("_", "-")
        flags = [known[2:] for known in self._option_string_actions if known.startswith("--")]
        if word in ("method", "methods") and any(action.dest == "methods" for action in self._actions):
            return f"methods have no flag, as in '{self.prog} fedavg greg'."
        if word.replace("-", "_") in configuration.option_names() and not {word, f"{word}s"} & {*flags}:
            return f"it is one of 'fedkeel run'; see '{self.prog} --help'."
        near = nearest(word, flags, otherwise="")
        return near.replace(" '", " '--") or f"see '{self.prog} --help'."

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            # argparse hides the sentence of a `type`, which says what to give.
            raise error.__context__ if isinstance(error.__context__, FedkeelError) else error from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = "command" if isinstance(action.choices, dict) else action.dest
            raise argparse.ArgumentError(None, unknown(kind, str(value), [str(choice) for choice in action.choices]))


def add_command(
    commands: Any, name: str, run: Callable[[Arguments], int] | None, *, help: str, page: str | None, usage: str
) -> Parser:
    """A command under `commands`; its `--help` shows `page`, a docstring that may end in "examples:"."""
    description, heading, examples = inspect.cleandoc(page or "").partition("examples:")
    # By itself argparse would begin with all forty flags; they are explained one by one further down.
    texts = {"usage": f"%(prog)s {usage}", "description": description.strip(), "epilog": heading + examples}
    parser: Parser = commands.add_parser(name, help=help, **texts)
    parser.set_defaults(run=run)
    return parser


def given_options(arguments: Arguments, without: Container[str] = ()) -> dict[str, Any]:
    """The options that the file and the flags set, the flags on top; what is short for an option of the data set goes
    into its brackets. `without` those that a command sets itself: a run's config.toml, given as the file, names all."""
    path = getattr(arguments, "config", None)
    inside = {name: getattr(arguments, name, None) for name in ("root", "tolerate")}
    options = configuration.read(path) if path else {}
    options |= flags(arguments)
    if any(value is not None for value in inside.values()):
        options["data"] = str(with_options(str(options.get("data", "folder")), **inside))
    return {name: value for name, value in options.items() if name not in without}


def flags(arguments: Arguments) -> dict[str, Any]:
    """The options of a run that the flags alone set."""
    given = {name: getattr(arguments, name, None) for name in configuration.option_names()}
    return {name: typed(name, value) for name, value in given.items() if value is not None}


def with_options(data: str, **options: Any) -> spec.Spec:
    """The data set with more options than its text has; what is None is left out.

    >>> str(with_options("folder(size=64)", root="./images"))
    "folder(size=64, root='./images')"
    """
    parsed = spec.parse(data)
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name in parsed.options:
            raise FedkeelError(f"The {name} is given twice, in '{data}' and as '{value}': keep one.")
    return spec.Spec(parsed.name, {**parsed.options, **given})
