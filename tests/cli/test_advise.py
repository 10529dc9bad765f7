"""`fedkeel advise`: what it prints, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedkeel
from fedkeel.cli import build_parser, main
from fedkeel.config import Config, option_names
from fedkeel.experiments.rows import SET_BY_ADVICE
from fedkeel.stopping import Stopped, stop_requested

QUICK = ["--subsample", "30", "--model", "simple_cnn(width=2)", "--executor", "serial", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_numbers_then_methods_then_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--rounds", "1", *QUICK]) == 0
    out = capsys.readouterr().out
    parts = [
        "digits-shift: 5 clients with 30 training samples",
        "Labels: ",
        "Looks at encoder.bn1",
        "Pilot: FedAvg gets",
    ]
    parts += ["Try:", "  fedavg: ", "  greg: looks lie 0.", "    ledger: ", "Calibrate: yes", "Not known:", "Next:"]
    parts += ["fedkeel compare fedavg greg", "fedkeel tune fedavg greg", "fedkeel calibrate RUN --images DIR"]
    places = [out.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert not any(Path().iterdir())


def test_json_is_what_python_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--json", "--rounds", "1", *QUICK]) == 0
    options = {"subsample": 30, "model": "simple_cnn(width=2)", "executor": "serial", "device": "cpu"}
    expected = fedkeel.advise(rounds=1, verbose=False, **options).to_dict()
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected))


def test_the_pilot_can_be_kept_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--rounds", "1", "--out", "kept", *QUICK]) == 0
    assert fedkeel.Run("kept").config.method == "fedavg"
    capsys.readouterr()
    assert main(["show", "kept"]) == 0
    assert main(["advise", "--rounds", "1", "--out", "kept", *QUICK]) == 2  # nothing is overwritten
    assert "kept" in capsys.readouterr().err


def test_a_pilot_that_was_stopped_is_not_in_the_way_of_the_next() -> None:
    options = {"subsample": 30, "model": "simple_cnn(width=2)", "executor": "serial", "device": "cpu", "rounds": 1}
    stop_requested.set()
    try:
        with pytest.raises(Stopped):
            fedkeel.advise(directory="kept", **options)
    finally:
        stop_requested.clear()
    assert list(Path().iterdir()) == []


def test_a_configuration_of_a_run_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Which names a method, rounds and much else that a pilot has no use for."""
    Path("run.toml").write_text(Config(method="greg", rounds=30, batch_size=4, patience=3, metrics="auc").to_toml())
    assert main(["advise", "--no-pilot", "--config", "run.toml", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "batches have 4" in out
    assert "fedkeel compare fedavg fedwon greg fedbn " in out
    assert "--batch-size 4" in out
    assert "--patience" not in out


def test_code_of_ones_own_is_part_of_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("x = 1\n")
    assert main(["advise", "--no-pilot", "--import", "mine.py", *QUICK]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  fedkeel compare")]
    assert commands
    assert all(line.endswith(" --import mine.py") for line in commands)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "0"], "'rounds' is '0': give a whole number, at least 1."),
        (["--no-pilot", "--rounds", "3"], "'--rounds 3' is of the pilot, and '--no-pilot' is given: keep one."),
        (["--no-pilot", "--out", "x"], "'--out x' is of the pilot"),
        (["--data", "digts"], "did you mean 'digits'"),
        (["--data", "folder", "--root", "nowhere"], "nowhere"),
        (["--method", "greg"], "has no option '--method'"),
        (["--partition", "dirichlet(alpha=0)"], "alpha"),
        (["--data", "digits", "--partition", "domains"], "nothing federated to advise on"),
        (["--model", "no_such"], "no_such"),
        (["greg"], "does not know what to do with 'greg'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--quiet", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.strip().splitlines()) == 1
    assert not any(Path().iterdir())


def test_it_takes_what_describes_a_federation_and_its_training() -> None:
    known = vars(build_parser().parse_args(["advise"]))
    assert {*option_names()} - {*known} == {*SET_BY_ADVICE} - {"rounds"}


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from fedkeel.cli import main; main(['advise', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--no-pilot" in done.stdout
