"""`fedkeel advise`: what it prints, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedkeel
from fedkeel.cli import main
from fedkeel.config import Config

QUICK = ["--subsample", "30", "--model", "simple_cnn(width=2)", "--executor", "serial", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_numbers_then_methods_then_whether_to_calibrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--rounds", "1", *QUICK]) == 0
    out = capsys.readouterr().out
    parts = ["digits-shift: 5 clients with 30 training samples", "Labels ", "Looks ", "Pilot: FedAvg gets", "Try:"]
    parts += ["  fedavg: ", "  greg: looks differ much", "Calibrate: yes"]
    places = [out.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert not any(Path().iterdir())


def test_json_is_what_python_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--json", "--rounds", "1", *QUICK]) == 0
    options = {"subsample": 30, "model": "simple_cnn(width=2)", "executor": "serial", "device": "cpu"}
    expected = fedkeel.advise(rounds=1, verbose=False, **options).to_dict()
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected))


def test_a_configuration_of_a_run_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Which names a method, rounds and much else that a pilot has no use for."""
    Path("run.toml").write_text(Config(method="greg", rounds=30, batch_size=4, patience=3, metrics="auc").to_toml())
    assert main(["advise", "--no-pilot", "--config", "run.toml", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.index("  fedwon: ") < out.index("  greg: "), "batches of four images are small"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "0"], "'rounds' is '0': give a whole number, at least 1."),
        (["--no-pilot", "--rounds", "3"], "'--rounds' is of the pilot, and '--no-pilot' is given: keep one."),
        (["--data", "digts"], "did you mean 'digits'"),
        (["--data", "folder", "--root", "nowhere"], "nowhere"),
        (["--method", "greg"], "has no option '--method'"),
        (["--partition", "dirichlet(alpha=0)"], "alpha"),
        (["--data", "digits", "--partition", "domains"], "has one client"),
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
