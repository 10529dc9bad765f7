"""The commands that look and do not train: show, data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.cli import datasets
from fedkeel.cli.parsing import add_options, add_sources, examples, given_options
from fedkeel.config import Config, from_dict
from fedkeel.core.naming import file_name

if TYPE_CHECKING:
    from rich.console import Console

    from fedkeel.experiments.comparison import Comparison
    from fedkeel.runs.run import Run

DATA_OPTIONS = ("partition", "unseen", "subsample", "seed")
MOST_ROWS = 100  # of a table of clients that a person reads


def add_commands(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        usage="%(prog)s DIR... [options]",
        help="the result of a run, or a table of several",
        description="Show a run: its options, result and curve. Several runs, or a folder of them: one table.",
        epilog=examples(
            ["fedkeel show runs/digits-shift-fedavg-seed0", "fedkeel show runs/demo", "fedkeel show runs/*"]
        ),
    )
    show.add_argument("directories", nargs="+", metavar="DIR", help="a run directory, or a folder of run directories")
    show.add_argument("--json", action="store_true", help="print one JSON document")
    show.set_defaults(act=show_runs)

    data = commands.add_parser(
        "data",
        usage="%(prog)s COMMAND NAME [options]",
        help="look at a data set",
        description="Look at a data set before training on it.",
        epilog=examples(
            [
                "fedkeel data list                               what there is, and what of it is here",
                "fedkeel data check pacs --root ./PACS           is it complete?",
                "fedkeel data describe folder --root ./images",
                "fedkeel data show digits-shift -o digits.png",
                "fedkeel data pack pacs --size 64 --out pacs.npz",
            ]
        ),
    )
    actions = data.add_subparsers(title="commands", metavar="COMMAND", dest="action", required=True)
    sheet = actions.add_parser(
        "show",
        prog="fedkeel data show",
        usage="%(prog)s NAME [options]",
        help="write a picture of its domains and classes",
        description="Write a PNG with a block of rows for each domain and a column for each class.",
        epilog=examples(["fedkeel data show digits-shift -o digits.png"]),
    )
    sheet.add_argument("-o", "--output", metavar="FILE", help="the PNG to write (default: NAME.png)")
    describe = actions.add_parser(
        "describe",
        prog="fedkeel data describe",
        usage="%(prog)s NAME [options]",
        help="a table of its clients",
        description="A table of the clients: their domain and how many images they have.",
        epilog=examples(
            [
                "fedkeel data describe digits-shift --partition 'dirichlet(alpha=0.3, clients=4)'",
                "fedkeel data describe folder --root ./images --unseen sketch",
            ]
        ),
    )
    describe.add_argument("--json", action="store_true", help="print one JSON document")
    describe.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help=f"show the first N clients that train (default: {MOST_ROWS}; with --json, all)",
    )
    datasets.add_commands(actions)
    for parser, act in ((sheet, show_data), (describe, describe_data)):
        parser.add_argument("data", metavar="NAME", help="data set, with options: 'folder(root=./images, size=64)'")
        add_sources(parser, config=False)
        add_options(parser, only=DATA_OPTIONS)
        parser.set_defaults(act=act)


# -- show -----------------------------------------------------------------------------------------------------
def show_runs(arguments: argparse.Namespace) -> int:
    from fedkeel.experiments.comparison import collect_runs
    from fedkeel.runs.run import Run

    comparison = collect_runs(arguments.directories)
    if len(comparison.trials) == 1:
        run = Run(comparison.trials[0].directory)
        if arguments.json:
            print(json.dumps(run_document(run), indent=1))
        else:
            print_run(run)
    elif arguments.json:
        print(json.dumps(comparison.to_dict(), indent=1))
    else:
        print_comparison(comparison)
    return 0


def run_document(run: Run) -> dict[str, Any]:
    return {
        "directory": str(run.directory),
        "finished": run.finished,
        "config": run.config.to_dict(),
        "summary": run.sound_summary(),
        "curve": [{"round": entry["round"], "accuracy": entry["average"]} for entry in run.scores()],
        **({"profile": run.profile} if run.profile else {}),
    }


def print_run(run: Run) -> None:
    from fedkeel.cli.console import console, duration, plain_table
    from fedkeel.experiments.tables import DASH, percent, sparkline
    from fedkeel.runs.intact import how_to_continue
    from fedkeel.runs.summary import RULES, SOURCES, summarise_run

    out = console(sys.stdout)

    def say(text: str) -> None:
        out.print(text, markup=False)

    config, summary, curve = run.config, run.sound_summary(), run.scores()
    names = {**config.to_dict(), **{option: thing["name"] for option, thing in run.given.items()}}
    say(f"{names['method']} on {names['data']}, model {names['model']}, seed {config.seed}")
    changed = [f"{name}={value}" for name, value in config.to_dict().items() if is_worth_telling(name, value)]
    if changed:
        say(f"with {', '.join(changed)}")
    domains = summary["domains"] if summary else curve[-1]["domains"] if curve else {}
    untested = (summary or {}).get("untested_domains", [])
    if domains:
        unseen = set(summary["unseen_domains"]) if summary else set()
        numbers = [*((name, percent(value)) for name, value in domains.items()), *((name, DASH) for name in untested)]
        rows = [(f"{name} (unseen)" if name in unseen else name, number) for name, number in numbers]
        out.print(plain_table(["domain", "accuracy %"], rows))
    if summary:
        say(f"average {percent(summary['accuracy'])} % over domains ({RULES[summary['result']]})")
        say(f"        {percent(summary['samples_accuracy'])} % over samples")
        if summary["unseen"] is not None:
            say(f"        {percent(summary['unseen'])} % on unseen domains")
        if config.evaluate_with == "both":
            by_batch = summarise_run(run, summary["unseen_domains"], "batch")
            say(f"        {percent(by_batch['accuracy'])} % over domains with the batch's statistics")
        if untested:
            say(f"        {DASH} not tested: {', '.join(untested)}")
        if diverged := summary.get("diverged_domains"):
            say(f"loss    {DASH} not finite on {', '.join(diverged)}: the model has diverged there")
    averages = [entry["average"] for entry in curve if entry["average"] is not None]
    if averages:
        say(f"rounds  {sparkline(averages)}  {percent(averages[0])} to {percent(averages[-1])} %")
    if summary:
        traffic = f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down"
        if summary.get("questions"):
            traffic += f", {summary['questions']} exchanges beside the training"
        say(f"took    {duration(summary['seconds'])} ({summary['executor']})")
        per_round = (summary["bytes_up"] + summary["bytes_down"]) / config.rounds
        say(f"sent    {traffic}, {size(per_round)} a round")
        if "epsilon" in summary:
            source = SOURCES[summary.get("randomness", "seed")]
            say(f"privacy epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}, {config.dp}; {source}")
        say(f"run     {run.directory}")
    else:
        done = curve[-1]["round"] + 1 if curve else 0
        say(f"not finished: {done} of {config.rounds} rounds; continue with: {how_to_continue(run.directory)}")
    if run.profile:
        print_profile(run.profile, out)


def print_profile(document: dict[str, Any], out: Console) -> None:
    from fedkeel.cli.console import plain_table
    from fedkeel.engine.profile import client_caption, client_rows, phase_rows

    on_gpu = ["waited for the GPU"] if document["device"] != "cpu" else []
    rounds, total = len(document["rounds"]), document["total"]
    out.print(f"Where {total['seconds']:.1f} s went, {rounds} rounds and what came before them (profile.json):")
    headings = ["phase", "seconds", "share %", "ms a round", "calls", *on_gpu]
    out.print(plain_table(headings, phase_rows(document)))
    if total["clients"]:
        out.print(f"On the clients. {client_caption(document)}")
        out.print(plain_table(["part", "seconds", "share %", "calls", *on_gpu], client_rows(document)))


def is_worth_telling(name: str, value: Any) -> bool:
    if name in ("method", "data", "model", "seed"):
        return False
    return name in ("rounds", "batch_size", "learning_rate") or value != getattr(Config(), name)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def print_comparison(comparison: Comparison, sentences: Sequence[str] = ()) -> None:
    from fedkeel.cli.console import console, results_table

    out = console(sys.stdout)
    results = comparison.results
    if results.rows:
        out.print(results_table(results))
    for sentence in sentences:
        out.print(f"- {sentence}", markup=False)
    if sentences:
        out.print()
    if comparison.missing:
        out.print(f"Missing, not finished: {', '.join(comparison.missing)}.", markup=False)
    out.print(f"The run directories are in {comparison.directory}/", markup=False)


# -- data -----------------------------------------------------------------------------------------------------
def show_data(arguments: argparse.Namespace) -> int:
    config = from_dict(given_options(arguments))

    from fedkeel import data
    from fedkeel.engine.setup import load_federation

    federation = load_federation(config)
    path = data.contact_sheet(federation, arguments.output or Path(f"{file_name(federation.name)}.png"))
    print(path)
    return 0


def describe_data(arguments: argparse.Namespace) -> int:
    config = from_dict(given_options(arguments))

    from fedkeel import data
    from fedkeel.cli.console import console, plain_table
    from fedkeel.data.source import whole
    from fedkeel.engine.setup import load_federation

    if arguments.clients is not None:
        whole("--clients", arguments.clients, 1)
    federation = load_federation(config)
    most = arguments.clients or (None if arguments.json else MOST_ROWS)
    clients = [asdict(row) for row in data.describe(federation, most)]
    channels, height, width = federation.image_shape
    if arguments.json:
        shape = {"channels": channels, "height": height, "width": width}
        document = {
            "name": federation.name,
            "classes": federation.classes,
            "image": shape,
            "training_clients": len(federation.clients),
            "clients": clients,
        }
        print(json.dumps(document, indent=1))
        return 0
    headings = ["client", "domain", "train", "validation", "test", "classes", ""]
    rows = [[*list(row.values())[:-1], "unseen" if row["unseen"] else ""] for row in clients]
    caption = f"{federation.name}: {federation.num_classes} classes, images {channels}x{height}x{width}."
    if most is not None and most < len(federation.clients):
        caption += f" The first {most:,} of {len(federation.clients):,} clients."
    console(sys.stdout).print(plain_table(headings, rows, caption=caption))
    return 0
