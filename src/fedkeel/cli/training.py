"""The commands that train: run, compare, resume, demo."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from fedkeel.cli.interrupts import interruptible
from fedkeel.cli.parsing import add_options, add_sources, examples, given_options
from fedkeel.config import MACHINE_OPTIONS, from_dict
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import SET_BY_COMPARISON, read_methods, read_seeds
from fedkeel.runs.trackers import TRACKERS, require, tracked
from fedkeel.stopping import Stopped

STOPPED = 130


def add_commands(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="train one federation",
        description="Train one federation. Its run directory holds the configuration, the metrics and the model.",
        epilog=examples(
            [
                "fedkeel run --method 'fedprox(mu=0.1)' --rounds 50 --seed 1",
                "fedkeel run --data folder --root ./images --model 'resnet18(stem=small)' --device cuda",
                "fedkeel run --partition 'dirichlet(alpha=0.3, clients=4)' --participation 0.5",
                "fedkeel run --config runs/old/config.toml --learning-rate 0.05",
            ]
        ),
    )
    add_place(run, "the run directory (default: a new one in runs/)")
    add_tracker(run)
    add_sources(run)
    add_options(run)
    run.set_defaults(act=run_one)

    compare = commands.add_parser(
        "compare",
        usage="%(prog)s METHOD... [options]",
        help="train several methods over several seeds and print a table",
        description="Train each method with each seed and print a table: method by domain, mean and spread.\n"
        "The same command again continues: what is finished is not trained again.",
        epilog=examples(
            [
                "fedkeel compare fedavg fedbn gn",
                "fedkeel compare fedavg 'fedprox(mu=0.1)' fedprox+gn --seeds 5 --rounds 50",
                "fedkeel compare fedavg gn@learning_rate=0.05,batch_size=16 --seeds 0,7",
                "fedkeel compare fedavg fedbn --json > table.json",
            ]
        ),
    )
    compare.add_argument("methods", nargs="+", metavar="METHOD", help="a method; its own options after an @")
    compare.add_argument("--seeds", default="3", metavar="N", help="how many, or which, like 0,1,5 (default: 3)")
    add_jobs(compare)
    add_place(compare, "where the run directories go (default: runs/compare-DATA)")
    add_tracker(compare)
    add_sources(compare)
    add_options(compare, without=SET_BY_COMPARISON)
    compare.set_defaults(act=run_several)

    resume = commands.add_parser(
        "resume",
        usage="%(prog)s DIR [options]",
        help="go on with a run that was stopped",
        description=(
            "Go on with a run from its last good checkpoint. The result is that of a run never stopped.\n"
            "What changes the result needs a new run: fedkeel run --config DIR/config.toml --rounds 50"
        ),
        epilog=examples(
            [
                "fedkeel resume runs/digits-shift-fedavg-seed0",
                "fedkeel resume runs/digits-shift-fedavg-seed0 --device cpu     on another machine than it began on",
            ]
        ),
    )
    resume.add_argument("directory", metavar="DIR", help="the run directory")
    add_output(resume)
    add_tracker(resume)
    add_options(resume, only=set(MACHINE_OPTIONS) - {"round_timeout"}, default="as before")
    resume.set_defaults(act=resume_one)

    demo = commands.add_parser(
        "demo",
        help="compare the methods on built-in digits, in about three minutes",
        description="Compare the methods on digits-shift, five domains of real handwritten digits that look different.",
        epilog=examples(["fedkeel demo", "fedkeel demo --quick", "fedkeel demo --resume"]),
    )
    demo.add_argument("--seeds", default="3", metavar="N", help="how many, or which, like 0,1,5 (default: 3)")
    demo.add_argument("--quick", action="store_true", help="a few seconds: few rounds, one seed; shows that it works")
    demo.add_argument("--resume", action="store_true", help="keep the runs that are there and do the rest")
    add_jobs(demo)
    add_place(demo, "where the run directories go (default: runs/demo)")
    demo.set_defaults(act=run_demo)


def add_place(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--out", metavar="DIR", help=help)
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="no progress, only warnings and the result")


def add_tracker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--track", metavar="|".join(TRACKERS), help="send the curves to a tracker too, as they grow")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", metavar="N", help="runs at the same time (default: one per core; on a GPU 1)")


def run_one(arguments: argparse.Namespace) -> int:
    config = from_dict(given_options(arguments))
    require(arguments.track)

    from fedkeel.cli.console import RunProgress
    from fedkeel.simulation import free_directory, simulate

    directory = arguments.out or free_directory(config)
    try:
        with (
            interruptible(),
            RunProgress(quiet=arguments.quiet) as progress,
            tracked(arguments.track, directory, progress) as observer,
        ):
            run = simulate(config, directory=directory, observer=observer)
    except Stopped:
        return stopped(f"fedkeel resume {shlex.quote(str(directory))}")
    return show_result(arguments, run)


def resume_one(arguments: argparse.Namespace) -> int:
    require(arguments.track)

    from fedkeel.cli.console import RunProgress
    from fedkeel.simulation import resume

    try:
        with (
            interruptible(),
            RunProgress(quiet=arguments.quiet) as progress,
            tracked(arguments.track, arguments.directory, progress) as observer,
        ):
            run = resume(arguments.directory, observer=observer, **given_options(arguments))
    except Stopped:
        return stopped(shlex.join(["fedkeel", *arguments.typed]))
    return show_result(arguments, run)


def run_several(arguments: argparse.Namespace) -> int:
    options = given_options(arguments)
    for name in SET_BY_COMPARISON:  # a run's config.toml, given with --config, names both
        options.pop(name, None)
    read_methods(arguments.methods, options)
    seeds, jobs = read_seeds(arguments.seeds), whole_jobs(arguments)
    require(arguments.track)

    from fedkeel.cli.console import ComparisonProgress
    from fedkeel.experiments.comparison import compare

    try:
        with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
            comparison = compare(
                arguments.methods,
                seeds=seeds,
                directory=arguments.out,
                jobs=jobs,
                observer=progress,
                track=arguments.track,
                **options,
            )
    except Stopped:
        return stopped(shlex.join(["fedkeel", *arguments.typed]))
    return show_comparison(arguments, comparison)


def run_demo(arguments: argparse.Namespace) -> int:
    seeds, jobs = read_seeds(arguments.seeds), whole_jobs(arguments)

    from fedkeel.cli.console import ComparisonProgress
    from fedkeel.experiments.demo import demo, findings, introduction

    if not (arguments.quiet or arguments.json):
        print(introduction(quick=arguments.quick), file=sys.stderr)
    try:
        with interruptible(), ComparisonProgress(quiet=arguments.quiet) as progress:
            comparison = demo(
                arguments.out or "runs/demo",
                seeds=seeds,
                jobs=jobs,
                quick=arguments.quick,
                resume=arguments.resume,
                observer=progress,
            )
    except Stopped:
        again = [word for word in arguments.typed if word != "--resume"]
        return stopped(shlex.join(["fedkeel", *again, "--resume"]))
    page = write_report(comparison) if comparison.runs else None
    return show_comparison(arguments, comparison, [] if arguments.quick else findings(comparison.results), page)


def write_report(comparison: Any) -> Path | None:
    """The page of a demo; what keeps it from being written must not cost the table."""
    from fedkeel import report

    try:
        return report.write([comparison.directory])
    except FedkeelError as problem:
        print(f"fedkeel: there is no report: {visible(str(problem))}", file=sys.stderr)
        return None


def whole_jobs(arguments: argparse.Namespace) -> int | None:
    if arguments.jobs is None:
        return None
    if not arguments.jobs.isdigit() or int(arguments.jobs) < 1:
        raise FedkeelError(f"'jobs' is '{arguments.jobs}': give a whole number, at least 1.")
    return int(arguments.jobs)


def stopped(command: str) -> int:
    print(f"fedkeel: stopped; continue with: {command}", file=sys.stderr)
    return STOPPED


def show_result(arguments: argparse.Namespace, run: Any) -> int:
    from fedkeel.cli.looking import print_run, run_document

    if arguments.json:
        print(json.dumps(run_document(run), indent=1))
    else:
        print_run(run)
    return 0


def show_comparison(
    arguments: argparse.Namespace, comparison: Any, sentences: list[str] | None = None, page: Path | None = None
) -> int:
    from fedkeel.cli.looking import print_comparison

    if arguments.json:
        extra: dict[str, Any] = {"findings": sentences} if sentences is not None else {}
        extra |= {"report": str(page)} if page else {}
        print(json.dumps({**comparison.to_dict(), **extra}, indent=1))
    else:
        print_comparison(comparison, sentences or [])
        if page:
            print(f"The report, with curves: {page}")
    for name, problem in comparison.failures.items():
        print(f"fedkeel: {visible(f'{name} is missing from the table: {problem}')}", file=sys.stderr)
    return 1 if comparison.missing else 0
