"""Show a run: its options, result and curve; of one over a network that goes on, its sites. Several runs, or a
folder of them: one table. With --diagnostic, look at runs through one of the papers' diagnostics: a short table
of each, and all of it in DIR/diagnostics/NAME.json.

examples:
  fedkeel show runs/digits-shift-fedavg-seed0
  fedkeel show runs/demo
  fedkeel show runs/* --metric balanced-accuracy
  fedkeel show runs/digits-shift-fedavg-seed0 --details
  fedkeel show runs/digits-shift-fedavg-seed0 --diagnostic representation-divergence
  fedkeel show runs/demo/*/seed0 --diagnostic 'tsne(samples=500)'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedkeel
from fedkeel.cli.terminal.figures import figure_lines
from fedkeel.cli.terminal.output import Line, Table, duration, show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.config import Config
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.runs.summary import RULES, SOURCES, stopped_early

if TYPE_CHECKING:
    from fedkeel.experiments.comparison import Comparison

HELP = "the result of a run, or a table of several; a diagnostic"
USAGE = "DIR... [options]"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a run directory, or a folder of run directories")
    parser.add_shared("--metric")
    parser.add_argument("--details", action="store_true", help="of one run: every class, and the confusion matrix")
    parser.add_argument("--diagnostic", metavar="NAME", help="one of 'fedkeel list diagnostics', with its options")
    parser.add_argument("--out", metavar="DIR", help="write the diagnostic to DIR/diagnostics, of one run")
    parser.add_shared("--json", "--import")


def run(arguments: Arguments) -> int:
    from fedkeel.experiments.comparison import collect_runs, comparisons_in

    if arguments.diagnostic:
        return show_diagnostic(arguments)
    if arguments.out is not None:
        raise FedkeelError("'--out' is of a diagnostic, and none is asked for: give --diagnostic, or leave it out.")
    parts = comparisons_in(arguments.directories[0]) if len(arguments.directories) == 1 else []
    if len(parts) > 1 and not (arguments.details or arguments.json):  # such as the demo: a table for each
        for part in parts:
            show_comparison(collect_runs([part]), as_json=False, metric=arguments.metric)
        return 0
    comparison = collect_runs(arguments.directories)
    if len(comparison.trials) == 1:
        run = fedkeel.Run(comparison.trials[0].directory)
        return show_run(run, arguments.metric, as_json=arguments.json, details=arguments.details, notes=True)
    if arguments.details:
        raise FedkeelError(f"'--details' are of one run, and these are {len(comparison.trials)}: give one of them.")
    show_comparison(comparison, as_json=arguments.json, metric=arguments.metric)
    return 0


def show_diagnostic(arguments: Arguments) -> int:
    for given, flag in ((arguments.details, "--details"), (arguments.metric != "accuracy", "--metric")):
        if given:
            raise FedkeelError(f"'{flag}' does nothing with '--diagnostic': leave one of them out.")
    if arguments.out is not None and len(arguments.directories) > 1:
        raise FedkeelError(
            f"'--out {arguments.out}' takes one run and {len(arguments.directories)} are given: give one."
        )
    fedkeel.analysis.build(arguments.diagnostic)  # refused before a run is read
    runs = [fedkeel.Run(directory) for directory in arguments.directories]  # all are there before the first is
    documents: list[dict[str, Any]] = []
    for run in runs:
        place = run.directory if arguments.out is None else Path(arguments.out)
        document = fedkeel.analysis.run(arguments.diagnostic, run, save=place)
        documents.append({"directory": str(run.directory), **document})
        if not arguments.json:
            paper = f" ({document['paper']})" if document["paper"] else ""
            title = f"{run.config.method}, seed {run.config.seed}: {document['title']}{paper}"
            written = f"written {place / 'diagnostics' / document['name']}.json"
            show([title, document["what"], *figure_lines(document["figures"]), written])
    if arguments.json:
        print(json.dumps(documents[0] if len(runs) == 1 else documents, indent=1))
    return 0


def show_run(
    run: fedkeel.Run, metric: str = "accuracy", *, as_json: bool, details: bool = False, notes: bool = False
) -> int:
    """`notes`: what is remarkable about the result; who has just run it has been told."""
    document = {
        "directory": str(run.directory),
        "finished": run.finished,
        "config": run.config.to_dict(),
        "summary": run.sound_summary(),
        "curve": [{"round": entry["round"], "accuracy": entry["average"]} for entry in run.scores()],
        **({"measures": run.measures.to_dict()} if run.has_measures else {}),
    }
    if metric != "accuracy":
        run.measure(metric)  # refused before anything is printed
    lines = [*run_lines(run), *measure_lines(run, metric, details=details)]
    lines += [f"note    {sentence}" for sentence in (run.measures.notes() if notes and run.has_measures else ())]
    show(lines, document, as_json=as_json)
    return 0


def measure_lines(run: fedkeel.Run, metric: str, *, details: bool) -> Iterator[Line]:
    """What the model does on every test set, beyond its accuracy."""
    from fedkeel.report.measures import class_table, confusion_table, site_table

    if not run.has_measures:
        if details:
            yield f"no measures by class: {run.directory} is not finished, or of an earlier version"
        return
    yield Table(*site_table(run.measures, metric))
    if details:
        yield Table(*class_table(run.measures))
        yield Table(*confusion_table(run.measures))


def run_lines(run: fedkeel.Run) -> Iterator[Line]:
    from fedkeel.experiments.tables import DASH, percent, sparkline
    from fedkeel.runs.intact import how_to_continue

    config, summary, curve = run.config, run.sound_summary() or {}, run.scores()
    options, defaults = config.to_dict(), Config().to_dict()
    names = {**options, **{option: thing["name"] for option, thing in run.given.items()}}
    yield f"{names['method']} on {names['data']}, model {names['model']}, seed {config.seed}"
    always, never = ("rounds", "batch_size", "learning_rate"), ("method", "data", "model", "seed")
    notable = [name for name in options if name in always or (name not in never and options[name] != defaults[name])]
    yield f"with {', '.join(f'{name}={options[name]}' for name in notable)}"
    domains = summary["domains"] if summary else curve[-1]["domains"] if curve else {}
    if domains:
        cells = {name: percent(value) for name, value in domains.items()}
        cells |= dict.fromkeys(summary.get("untested_domains", []), DASH)
        unseen = summary.get("unseen_domains", [])
        rows = [(f"{name} (unseen)" if name in unseen else name, cell) for name, cell in cells.items()]
        yield Table(["domain", "accuracy %"], rows)
    if summary:
        yield from accuracy_lines(run, summary)
    averages = [entry["average"] for entry in curve if entry["average"] is not None]
    if averages:
        yield f"rounds  {sparkline(averages)}  {percent(averages[0])} to {percent(averages[-1])} %"
    if summary:
        yield from cost_lines(run, summary)
    else:
        yield from site_lines(run)
        done = curve[-1]["round"] + 1 if curve else 0
        yield f"not finished: {done} of {config.rounds} rounds; continue with: {how_to_continue(run.directory)}"


def site_lines(run: fedkeel.Run) -> Iterator[Line]:
    """Of a federation over a network what each site last did."""
    from fedkeel.runs import live

    if sites := live.read(run.directory).get("sites"):
        rows = [
            (name, site["state"], "yes" if site.get("connected") else "no", site.get("at", ""))
            for name, site in sites.items()
        ]
        yield Table(["site", "state", "connected", "since"], rows)


def accuracy_lines(run: fedkeel.Run, summary: dict[str, Any]) -> Iterator[str]:
    from fedkeel.experiments.tables import DASH, percent
    from fedkeel.runs.summary import summarise_run

    yield f"average {percent(summary['accuracy'])} % over domains ({RULES[summary['result']]})"
    yield f"        {percent(summary['samples_accuracy'])} % over samples"
    if summary["unseen"] is not None:
        yield f"        {percent(summary['unseen'])} % on unseen domains"
    for statistics in run.config.statistics[1:]:
        found = summarise_run(run, summary["unseen_domains"], statistics)
        whose = "calibrated to each site" if statistics == "site" else "with the batch's statistics"
        yield f"        {percent(found['accuracy'])} % over domains {whose}"
    if untested := summary.get("untested_domains"):
        yield f"        {DASH} not tested: {', '.join(untested)}"
    if diverged := summary.get("diverged_domains"):
        yield f"loss    {DASH} not finite on {', '.join(diverged)}: the model has diverged there"


def cost_lines(run: fedkeel.Run, summary: dict[str, Any]) -> Iterator[str]:
    up, down, config = summary["bytes_up"], summary["bytes_down"], run.config
    rounds = summary.get("rounds", config.rounds)
    if stopped := stopped_early(summary, config.patience):
        yield stopped
    if "extended" in summary:
        number = " and ".join(map(str, summary["extended"]))
        yield f"Extended after round {number}."
    asked = f", {summary['questions']} exchanges beside the training" if summary.get("questions") else ""
    yield f"took    {duration(summary['seconds'])} ({summary['executor']})"
    yield f"sent    {size(up)} up, {size(down)} down{asked}, {size((up + down) / rounds)} a round"
    if "epsilon" in summary:
        source = SOURCES[summary.get("randomness", "seed")]
        yield f"privacy epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}, {config.dp}; {source}"
    yield f"run     {run.directory}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def show_comparison(comparison: Comparison, *, as_json: bool, metric: str = "accuracy") -> int:
    """Returns the exit code of a command that was to fill the table: 1 where a run is missing."""
    lines = [*comparison_lines(comparison, metric), f"The run directories are in {comparison.directory}/"]
    show(lines, comparison.to_dict(metric), as_json=as_json)
    return tell_failures(comparison)


def comparison_lines(comparison: Comparison, metric: str = "accuracy", findings: Sequence[str] = ()) -> list[Line]:
    results = comparison.results_by(metric)
    lines: list[Line] = [results] if results.rows else []
    lines += [*(f"- {sentence}" for sentence in findings), ""] if findings else []
    return lines + ([f"Missing, not finished: {', '.join(comparison.missing)}."] if comparison.missing else [])


def tell_failures(comparison: Comparison) -> int:
    for name, problem in comparison.failures.items():
        print(f"fedkeel: {visible(f'{name} is missing from the table: {problem}')}", file=sys.stderr)
    return 1 if comparison.missing else 0
