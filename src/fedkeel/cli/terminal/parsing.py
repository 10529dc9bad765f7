"""From what a person types to options: flags made from `Config`, and a mistake in one sentence."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Collection, Container
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
COMMON = {  # what `--help` shows of the options of a run; `--help-all` has every one
    "what is trained": ("data", "partition", "unseen", "method", "model", "weights"),
    "rounds": ("rounds", "participation", "clients_per_round"),
    "local training": ("local_epochs", "local_steps", "batch_size", "loss", "optimizer", "learning_rate", "schedule"),
    "result": ("evaluate_with", "metrics", "result", "patience"),
    "trust": ("robust", "dp"),
    "machine": ("seed", "executor", "workers", "device"),
}
FEW = 30  # options that `--help` shows in any case


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


def one_of(kind: str, choices: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise FedkeelError(unknown(kind, text, choices))
        return text

    return read


def told(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse hides what an error of a type says, unless it is of this kind."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except FedkeelError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reading


# Flags that several commands have.
METRIC = "what the table is of: accuracy, balanced-accuracy, f1, auc, ece, ... (default: accuracy)"
SEEDS = "how many, or which, like 0,1,5 (default: 3)"
IMPORT = "a Python file that registers methods, models, ... of your own; may be given again"
JOBS = "runs at the same time (default: one per core; on a GPU 1; under ray as many as the cluster has room for)"
SHARED: dict[str, dict[str, Any]] = {
    "--metric": {"metavar": "NAME", "default": "accuracy", "help": METRIC},
    "--json": {"action": "store_true", "help": "print one JSON document"},
    "--quiet": {"action": "store_true", "help": "no progress, only warnings and the result"},
    "--track": {"metavar": "|".join(TRACKERS), "type": require, "help": "send the curves to a tracker as they grow"},
    "--config": {"metavar": "FILE", "help": "read options from a TOML file; flags come on top"},
    "--tolerate": {"metavar": "X", "type": share, "help": "share of image files that may be broken (default: 0.01)"},
    "--root": {"metavar": "DIR", "help": "short for --data 'NAME(root=DIR)'"},
    "--seeds": {"metavar": "N", "default": "3", "type": read_seeds, "help": SEEDS},
    "--import": {"metavar": "FILE", "dest": "imports", "action": "append", "default": [], "help": IMPORT},
    "--jobs": {"metavar": "N", "type": whole("jobs", 1), "help": JOBS},
}


class HelpAll(argparse.Action):
    """As `--help`, with the options that it leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        for action, text in parser.left_out:
            action.help = text
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in one sentence with the nearest valid choice, and leaves exiting to `main`."""

    def __init__(self, **options: Any) -> None:
        self.flags: list[str] = []
        self.commands: dict[str, Parser] = {}
        self.left_out: list[tuple[argparse.Action, str]] = []
        # An abbreviation that works today is ambiguous once another option is added.
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self.flags += names
        if (choices := options.pop("choices", None)) is not None:
            options["type"] = one_of(names[0].lstrip("-"), [*choices])
        if "type" in options:
            options["type"] = told(options["type"])
        return super().add_argument(*names, **options)

    def add_shared(self, *flags: str) -> None:
        for flag in flags:
            self.add_argument(flag, **SHARED[flag])

    def add_options(self, names: Container[str] | None = None, default: str = "") -> None:
        """A flag for each of these options of `Config`, or all, under its heading, with its default or `default`."""
        hints, entries = get_type_hints(Config), {entry.name: entry for entry in fields(Config)}
        taken = [name for name in entries if names is None or name in names]
        groups, heading = dict[str, list[str]](), ""
        for name in entries:
            heading = entries[name].metadata["heading"] or heading
            if name in taken:
                groups.setdefault(heading, []).append(name)
        shown = {name for some in COMMON.values() for name in some} if len(taken) > FEW else {*taken}
        if len(taken) > FEW:
            self.add_argument("--help-all", action=HelpAll, nargs=0, help="every option, and exit")
            common = [(heading, [name for name in some if name in taken]) for heading, some in COMMON.items()]
            others = [(heading, [name for name in some if name not in shown]) for heading, some in groups.items()]
            sections = [*common, *((f"more: {heading}", some) for heading, some in others)]
        else:
            sections = [*groups.items()]
        for heading, some in sections:
            group = self.add_argument_group(heading)
            for name in some:
                hint, entry = hints[name], entries[name]
                metavar = "|".join(get_args(hint)) or {int: "N", float: "X"}.get(hint, "TEXT")
                kind = {"action": argparse.BooleanOptionalAction} if hint is bool else {"metavar": metavar}
                plain = ("yes" if entry.default else "no") if hint is bool else str(entry.default) or "none"
                text = f"{entry.metadata['help'].replace('%', '%%')} (default: {default or plain})"
                flag = f"--{name.replace('_', '-')}"
                given = text if name in shown else argparse.SUPPRESS
                action = group.add_argument(flag, default=None, help=given, **kind)
                self.flags.append(flag)
                self.left_out += [(action, text)] if name not in shown else []

    def begin_commands(self, *, required: bool) -> None:
        texts = {"title": "commands", "metavar": "COMMAND", "prog": self.prog}
        self.below: Any = self.add_subparsers(**texts, required=required)

    def add_command(
        self, name: str, run: Callable[[Arguments], int] | None, *, help: str, page: str | None, usage: str
    ) -> Parser:
        """A command; its `--help` shows `page`, a docstring that may end in "examples:"."""
        description, heading, examples = inspect.cleandoc(page or "").partition("examples:")
        # By itself argparse would begin with all forty flags; they are explained one by one further down.
        texts = {"usage": f"%(prog)s {usage}", "description": description.strip(), "epilog": heading + examples}
        command: Parser = self.below.add_parser(name, help=help, **texts)
        command.set_defaults(run=run)
        self.commands[name] = command
        return command

    # -- mistakes ------------------------------------------------------------------------------------------------
    def error(self, message: str) -> NoReturn:
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"'{self.prog}' lacks {missing[1]}"
        message = re.sub(r"^argument [^:]+: (?=.*[.?]$)", "", message, flags=re.DOTALL)
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise FedkeelError(message if message.endswith((".", "?")) else f"{message}: see '{self.prog} --help'.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else [*args]
        if self.commands and args and not args[0].startswith("-") and args[0] not in self.commands:
            raise FedkeelError(unknown("command", args[0], self.commands))
        # Each command's own parser refuses what it does not know, since it alone knows what is near.
        known, extra = super().parse_known_args(args, namespace)
        if not extra:
            return known, extra
        given = extra[0]
        if given.startswith("-") and given != "-":
            flag = given.partition("=")[0]
            raise FedkeelError(f"'{self.prog}' has no option '{flag}': {self._hint(flag.lstrip('-'))}")
        hint = f"did you mean '--method {given}'?" if "--method" in self.flags else f"see '{self.prog} --help'."
        raise FedkeelError(f"'{self.prog}' does not know what to do with '{given}': {hint}")

    def _hint(self, word: str) -> str:
        """What may have been meant by an unknown flag, given without its dashes, by which any two would be near."""
        word = word.replace("_", "-")
        flags = [known[2:] for known in self.flags if known.startswith("--")]
        if word in ("method", "methods") and "methods" in self.flags:
            return f"methods have no flag, as in '{self.prog} fedavg greg'."
        if word.replace("-", "_") in configuration.option_names() and not {word, f"{word}s"} & {*flags}:
            return f"it is one of 'fedkeel run'; see '{self.prog} --help'."
        near = nearest(word, flags, otherwise="")
        return near.replace(" '", " '--") or f"see '{self.prog} --help'."


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
