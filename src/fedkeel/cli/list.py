"""What there is to choose from, a line each; with a name, its options and their defaults, and its paper.

examples:
  fedkeel list                     the kinds
  fedkeel list methods
  fedkeel list methods fedprox     its options and its paper
  fedkeel list models --json
  fedkeel list methods mine --import my_methods.py
"""

import inspect
import json
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.registry import Entry, Registry

HELP = "the methods, models, data sets, ... there are"
USAGE = "[KIND [NAME...]] [options]"
KINDS = {  # what they are, and where
    "methods": ("how a federation trains: --method", "fedkeel.methods:METHODS"),
    "models": ("the networks: --model", "fedkeel.models:MODELS"),
    "data": ("the data sets: --data", "fedkeel.data:DATASETS"),
    "partitions": ("how a domain's images become clients: --partition", "fedkeel.data:PARTITIONS"),
    "transforms": ("what is done to images: options of --data", "fedkeel.data:TRANSFORMS"),
    "executors": ("where clients run: --executor", "fedkeel.engine:EXECUTORS"),
    "losses": ("what a network is trained on: --loss", "fedkeel.engine.losses:LOSSES"),
    "optimizers": ("the local optimisers: --optimizer", "fedkeel.engine.optimizers:OPTIMIZERS"),
    "schedules": ("the learning rate from round to round: --schedule", "fedkeel.engine.schedules:SCHEDULES"),
    "metrics": ("what tests measure beside accuracy and loss: --metrics", "fedkeel.engine.metrics:METRICS"),
    "robust": ("rules against clients that lie: --robust", "fedkeel.trust.robust:ROBUST"),
    "diagnostics": ("how to look at a run: show --diagnostic, --record", "fedkeel.analysis:DIAGNOSTICS"),
}
# What a builder takes from the data or the engine, and nobody types.
GIVEN_BY_ENGINE = ("num_classes", "in_channels", "image_size")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("list", nargs="?", choices=KINDS, metavar="KIND", help=" | ".join(KINDS))
    parser.add_argument("names", nargs="*", metavar="NAME", help="one of them, to be shown with its options")
    parser.add_shared("--json", "--import")


def run(arguments: Arguments) -> int:
    kind: str | None = arguments.list
    if kind is None:
        lines = [f"{name:<{max(map(len, KINDS))}}  {what}" for name, (what, _) in KINDS.items()]
        text = "\n".join([*lines, "", "KIND is one of these: fedkeel list KIND"])
        print(json.dumps([*KINDS]) if arguments.json else text)
        return 0
    known = registry(kind)
    entries = [describe_entry(entry) for entry in [known.entry(name) for name in arguments.names] or known]
    if kind == "executors":  # they get everything from the run
        entries = [entry | {"options": {}, "required": []} for entry in entries]
    if arguments.json:
        print(json.dumps(entries, indent=1, default=str))
    elif arguments.names:
        print("\n\n".join(map(in_full, entries)))
    else:
        print_names(kind, entries)
    return 0


def print_names(kind: str, entries: Sequence[dict[str, Any]]) -> None:
    """A line each, cut where the terminal ends, and with the paper where it is wide enough."""
    from fedkeel.cli.terminal.console import console

    out = console(sys.stdout)
    names, summaries, papers = (max(len(entry[column]) for entry in entries) for column in ("name", "summary", "paper"))
    has_room = out.width >= names + summaries + papers + 4
    for entry in entries:
        line = f"{entry['name']:<{names}}  {entry['summary']:<{summaries}}  {entry['paper'] if has_room else ''}"
        out.print(line.rstrip(), no_wrap=True, overflow="ellipsis")
    more = " With timm installed, any of its models works as timm:NAME." if kind == "models" else ""
    out.print(f"\nOptions and paper: fedkeel list {kind} {entries[0]['name']}.{more}")


def in_full(entry: dict[str, Any]) -> str:
    options = [
        f"  {name}, which must be given" if name in entry["required"] else f"  {name}={value}"
        for name, value in entry["options"].items()
    ]
    paper = [f"paper    {entry['paper']}"] if entry["paper"] else []
    heading = "options and their defaults:" if options else "options  none"
    return "\n".join([entry["name"], entry["summary"], *paper, heading, *options])


def registry(kind: str) -> Registry[Any]:
    found: Registry[Any] = pkgutil.resolve_name(KINDS[kind][1])
    return found


def describe_entry(entry: Entry[Any]) -> dict[str, Any]:
    defaults = {name: option.default for name, option in entry.options().items() if name not in GIVEN_BY_ENGINE}
    required = [name for name, default in defaults.items() if default is inspect.Parameter.empty]
    options = defaults | dict.fromkeys(required)
    document = {"name": entry.name, "options": options, "required": required}
    return {**document, "summary": entry.summary, "paper": entry.paper}
