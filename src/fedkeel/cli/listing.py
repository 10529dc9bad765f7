"""The command that says what there is to choose from: list."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedkeel.cli.parsing import examples

if TYPE_CHECKING:
    from fedkeel.registry import Entry, Registry

KINDS = {
    "methods": "how a federation trains: --method",
    "models": "the networks: --model",
    "data": "the data sets: --data",
    "partitions": "how a domain's images become clients: --partition",
    "transforms": "what is done to images: options of --data",
    "executors": "where clients run: --executor",
    "robust": "rules against clients that lie: --robust",
    "diagnostics": "how to look at a run: analyse, --record",
}
# What a builder takes from the data or the engine, and nobody types.
GIVEN_BY_ENGINE = ("num_classes", "in_channels", "image_size", "worker", "memory", "workers")


def add_commands(commands: Any) -> None:
    listing = commands.add_parser(
        "list",
        usage="%(prog)s [KIND [NAME...]] [options]",
        help="the methods, models, data sets, ... there are",
        description="What there is to choose from, a line each; with a name, its options and their defaults, and its "
        "paper.",
        epilog=examples(
            [
                "fedkeel list                     the kinds",
                "fedkeel list methods",
                "fedkeel list methods fedprox     its options and its paper",
                "fedkeel list models --json",
            ]
        ),
    )
    listing.add_argument("list", nargs="?", choices=KINDS, metavar="KIND", help=" | ".join(KINDS))
    listing.add_argument("names", nargs="*", metavar="NAME", help="one of them, to be shown with its options")
    listing.add_argument("--json", action="store_true", help="print one JSON document")
    listing.set_defaults(act=list_names)


def list_names(arguments: argparse.Namespace) -> int:
    kind: str | None = arguments.list
    if kind is None:
        print(json.dumps(list(KINDS)) if arguments.json else listed(KINDS, "KIND is one of these: fedkeel list KIND"))
        return 0
    known = registry(kind)
    chosen = [known.entry(name) for name in arguments.names] or list(known)
    entries = [describe_entry(entry) for entry in chosen]
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
    from fedkeel.cli.console import console

    out = console(sys.stdout)
    widths = [max(len(entry[column]) for entry in entries) for column in ("name", "summary")]
    papers = out.width >= sum(widths) + 4 + max(len(entry["paper"]) for entry in entries)
    for entry in entries:
        line = f"{entry['name']:<{widths[0]}}  {entry['summary']:<{widths[1]}}  {entry['paper'] if papers else ''}"
        out.print(line.rstrip(), markup=False, no_wrap=True, overflow="ellipsis")
    more = " Any timm model works by its name where timm is installed." if kind == "models" else ""
    out.print(f"\nOptions and paper: fedkeel list {kind} {entries[0]['name']}.{more}", markup=False)


def in_full(entry: dict[str, Any]) -> str:
    options = [
        f"  {name}, which must be given" if name in entry["required"] else f"  {name}={value}"
        for name, value in entry["options"].items()
    ]
    paper = [f"paper    {entry['paper']}"] if entry["paper"] else []
    heading = "options and their defaults:" if options else "options  none"
    return "\n".join([entry["name"], entry["summary"], *paper, heading, *options])


def listed(table: dict[str, str], ending: str) -> str:
    width = max(map(len, table))
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in table.items()), "", ending])


def registry(kind: str) -> Registry[Any]:
    from fedkeel import analysis, data, engine, methods, models
    from fedkeel.trust import robust

    tables: dict[str, Registry[Any]] = {
        "methods": methods.METHODS,
        "models": models.MODELS,
        "data": data.DATASETS,
        "partitions": data.PARTITIONS,
        "transforms": data.TRANSFORMS,
        "executors": engine.EXECUTORS,
        "robust": robust.ROBUST,
        "diagnostics": analysis.DIAGNOSTICS,
    }
    return tables[kind]


def describe_entry(entry: Entry[Any]) -> dict[str, Any]:
    options = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in entry.options().items()
        if name not in GIVEN_BY_ENGINE
    }
    required = [name for name, parameter in entry.options().items() if parameter.default is parameter.empty]
    return {
        "name": entry.name,
        "options": options,
        "required": [name for name in required if name in options],
        "summary": entry.summary,
        "paper": entry.paper,
    }
