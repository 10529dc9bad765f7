"""The commands in a report repeat its runs: what they parse to is the configuration that made them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from fedkeel.cli import build_parser
from fedkeel.cli.terminal.parsing import given_options
from fedkeel.config import Config, from_dict
from fedkeel.experiments.rows import read_methods, read_seeds
from fedkeel.report.commands import compare_command, run_command


def parsed(command: str) -> Any:
    program, *words = shlex.split(command)
    assert program == "fedkeel"
    return build_parser().parse_args(words)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(method="fedprox(mu=0.1)+gn", seed=7, learning_rate=1e-05, stateless=True, unseen="a, b"),
        Config(data="folder(root='./my images $HOME `x` \"q\"')", drop_last=True, evaluate_with="both"),
        Config(unseen="-odd"),
    ],
)
def test_the_command_of_a_run_is_its_configuration(config: Config) -> None:
    command = run_command(config)
    assert command is not None
    assert from_dict(given_options(parsed(command))) == config


def test_what_was_given_in_python_has_no_command() -> None:
    config = Config(data="(given in Python)")
    assert run_command(config) is None
    assert compare_command({"fedavg": [config]}) is None


@pytest.mark.parametrize("seeds", [[0], [5], [0, 1, 2], [3, 9]])
def test_the_command_of_a_comparison_is_its_configurations(seeds: list[int]) -> None:
    common: dict[str, Any] = {"rounds": 12, "data": "digits-shift(size=16)", "learning_rate": 0.02, "stateless": True}
    entries = read_methods(["fedavg", "fedwon@learning_rate=0.05", "univarfl@model=simple_cnn(projector=128)"], common)
    configs = {
        label: [entry.replace(seed=seed, executor="serial") for seed in seeds] for label, entry in entries.items()
    }
    command = compare_command(configs)
    assert command is not None
    arguments = parsed(command)
    assert read_seeds(arguments.seeds) == seeds
    assert read_methods(arguments.methods, given_options(arguments)) == entries


def test_runs_that_are_no_comparison_have_no_such_command() -> None:
    assert compare_command({"fedavg": [Config()], "gn": [Config(method="gn", seed=1)]}) is None, "seeds differ"
    assert compare_command({"fedavg": [Config()], "gn": [Config(method="gn", rounds=5)]}) is None, "rounds differ"
