"""Show a run: its options, result and curve. Several runs, or a folder of them: one table.

examples:
  fedkeel show runs/digits-shift-fedavg-seed0
  fedkeel show runs/demo
  fedkeel show runs/*
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.config import Config
from fedkeel.core.naming import visible

if TYPE_CHECKING:
    from rich.console import Console

    from fedkeel.experiments.comparison import Comparison
    from fedkeel.runs.run import Run

HELP = "the result of a run, or a table of several"
USAGE = "DIR... [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a run directory, or a folder of run directories")
    parser.add_shared("--json")


def run(arguments: Arguments) -> int:
    from fedkeel.experiments.comparison import gather
    from fedkeel.runs.run import Run

    comparison = gather(arguments.directories)
    if len(comparison.places) == 1:
        return show_run(Run(comparison.places[0].directory), as_json=arguments.json)
    show_comparison(comparison, as_json=arguments.json)
    return 0


# -- one run -----------------------------------------------------------------------------------------------------
def show_run(run: Run, *, as_json: bool) -> int:
    if not as_json:
        print_run(run)
        return 0
    document = {
        "directory": str(run.directory),
        "finished": run.finished,
        "config": run.config.to_dict(),
        "summary": run.sound_summary(),
        "curve": [{"round": entry["round"], "accuracy": entry["average"]} for entry in run.scores()],
        **({"profile": run.profile} if run.profile else {}),
    }
    print(json.dumps(document, indent=1))
    return 0


def print_run(run: Run) -> None:
    from fedkeel.cli.terminal.output import console, plain_table
    from fedkeel.experiments.tables import DASH, percent, sparkline
    from fedkeel.runs.intact import how_to_continue

    out, config, summary, curve = console(), run.config, run.sound_summary(), run.scores()
    names = {**config.to_dict(), **{option: thing["name"] for option, thing in run.given.items()}}
    out.print(f"{names['method']} on {names['data']}, model {names['model']}, seed {config.seed}")
    out.print(f"with {', '.join(options_to_show(config))}")
    domains = summary["domains"] if summary else curve[-1]["domains"] if curve else {}
    if domains:
        unseen, untested = ((summary or {}).get(f"{kind}_domains", []) for kind in ("unseen", "untested"))
        cells = {**{name: percent(value) for name, value in domains.items()}, **dict.fromkeys(untested, DASH)}
        rows = [(f"{name} (unseen)" if name in unseen else name, cell) for name, cell in cells.items()]
        out.print(plain_table(["domain", "accuracy %"], rows))
    for line in accuracy_lines(run, summary) if summary else ():
        out.print(line)
    averages = [entry["average"] for entry in curve if entry["average"] is not None]
    if averages:
        out.print(f"rounds  {sparkline(averages)}  {percent(averages[0])} to {percent(averages[-1])} %")
    for line in cost_lines(run, summary) if summary else ():
        out.print(line)
    if not summary:
        done = curve[-1]["round"] + 1 if curve else 0
        out.print(f"not finished: {done} of {config.rounds} rounds; continue with: {how_to_continue(run.directory)}")
    if run.profile:
        print_profile(run.profile, out)


def options_to_show(config: Config) -> Iterator[str]:
    usual = Config()
    for name, value in config.to_dict().items():
        if name in ("rounds", "batch_size", "learning_rate") or (
            name not in ("method", "data", "model", "seed") and value != getattr(usual, name)
        ):
            yield f"{name}={value}"


def accuracy_lines(run: Run, summary: dict[str, Any]) -> Iterator[str]:
    from fedkeel.experiments.tables import DASH, percent
    from fedkeel.runs.result import summarise_run
    from fedkeel.runs.summary import RULES

    yield f"average {percent(summary['accuracy'])} % over domains ({RULES[summary['result']]})"
    yield f"        {percent(summary['samples_accuracy'])} % over samples"
    if summary["unseen"] is not None:
        yield f"        {percent(summary['unseen'])} % on unseen domains"
    if run.config.evaluate_with == "both":
        by_batch = summarise_run(run, summary["unseen_domains"], "batch")
        yield f"        {percent(by_batch['accuracy'])} % over domains with the batch's statistics"
    if untested := summary.get("untested_domains"):
        yield f"        {DASH} not tested: {', '.join(untested)}"
    if diverged := summary.get("diverged_domains"):
        yield f"loss    {DASH} not finite on {', '.join(diverged)}: the model has diverged there"


def cost_lines(run: Run, summary: dict[str, Any]) -> Iterator[str]:
    from fedkeel.cli.terminal.output import duration
    from fedkeel.runs.summary import SOURCES

    up, down, config = summary["bytes_up"], summary["bytes_down"], run.config
    asked = f", {summary['questions']} exchanges beside the training" if summary.get("questions") else ""
    yield f"took    {duration(summary['seconds'])} ({summary['executor']})"
    yield f"sent    {size(up)} up, {size(down)} down{asked}, {size((up + down) / config.rounds)} a round"
    if "epsilon" in summary:
        source = SOURCES[summary.get("randomness", "seed")]
        yield f"privacy epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}, {config.dp}; {source}"
    yield f"run     {run.directory}"


def print_profile(document: dict[str, Any], out: Console) -> None:
    from fedkeel.cli.terminal.output import plain_table
    from fedkeel.engine.profile import client_caption, client_rows, phase_rows

    on_gpu = ["waited for the GPU"] if document["device"] != "cpu" else []
    rounds, total = len(document["rounds"]), document["total"]
    out.print(f"Where {total['seconds']:.1f} s went, {rounds} rounds and what came before them (profile.json):")
    out.print(plain_table(["phase", "seconds", "share %", "ms a round", "calls", *on_gpu], phase_rows(document)))
    if total["clients"]:
        out.print(f"On the clients. {client_caption(document)}")
        out.print(plain_table(["part", "seconds", "share %", "calls", *on_gpu], client_rows(document)))


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


# -- several -----------------------------------------------------------------------------------------------------
def show_comparison(
    comparison: Comparison, *, as_json: bool, findings: Sequence[str] | None = None, page: Path | None = None
) -> int:
    """Returns the exit code of a command that was to fill the table: 1 where a run is missing."""
    if as_json:
        extra = {"findings": findings, "report": str(page) if page else None}
        known = {name: value for name, value in extra.items() if value is not None}
        print(json.dumps({**comparison.to_dict(), **known}, indent=1))
    else:
        print_comparison(comparison, findings or [])
        if page:
            print(f"The report, with curves: {page}")
    for name, problem in comparison.failures.items():
        print(f"fedkeel: {visible(f'{name} is missing from the table: {problem}')}", file=sys.stderr)
    return 1 if comparison.missing else 0


def print_comparison(comparison: Comparison, findings: Sequence[str]) -> None:
    from fedkeel.cli.terminal.output import console, results_table

    out = console()
    if comparison.results.rows:
        out.print(results_table(comparison.results))
    for sentence in findings:
        out.print(f"- {sentence}")
    if findings:
        out.print()
    if comparison.missing:
        out.print(f"Missing, not finished: {', '.join(comparison.missing)}.")
    out.print(f"The run directories are in {comparison.directory}/")
