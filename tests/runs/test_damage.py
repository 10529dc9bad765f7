"""A flipped bit in what a run wrote is never shown, exported or trained on as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fedkeel
from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.runs.export import export
from fedkeel.runs.run import Run
from tests import tiny
from tests.runs.test_run import interrupted

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {
    **tiny.OPTIONS,
    "rounds": 1,
    "data": "digits-shift",
    "subsample": 10,
    "model": "simple_cnn(width=2)",
}
FILES = (
    *("summary.json", "metrics.jsonl", "model.safetensors", "personal/scan.safetensors", "checksums.json"),
    *("config.toml", "timing.jsonl", "federation.json", "origin.json", "measures.json"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedkeel.simulate(SHORT, directory=tmp_path_factory.mktemp("damage") / "run", method="fedbn")


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    intact = path.read_bytes()
    data = bytearray(intact)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(intact)


def some_bits(path: Path, most: int = 200) -> list[int]:
    """All of a small file, and of a larger one as many as asked for, the first and the last among them."""
    count = 8 * path.stat().st_size
    if count <= most:
        return list(range(count))
    return [0, count - 1, *random.Random(path.name).sample(range(count), most)]


@pytest.mark.parametrize("file", FILES)
def test_no_flipped_bit_of_a_finished_run_goes_unnoticed(finished: Run, file: str) -> None:
    path, told = finished.directory / file, 0
    for bit in some_bits(path):
        with flipped(path, bit):
            try:
                Run(finished.directory).check()
            except FedkeelError as error:
                assert Path(file).name in str(error)  # noqa: PT017
                assert "\n" not in str(error)  # noqa: PT017
                told += 1
    # What means nothing in the checksums, such as a blank, may be another.
    assert told == len(some_bits(path)) or (file == "checksums.json" and told > 150)


@pytest.mark.slow
def test_no_flipped_bit_of_the_metrics_is_trained_on(tmp_path: Path) -> None:
    """Before the last checkpoint the run goes back one or is refused, and after it nothing counts."""
    whole = tiny.result(tiny.run(tmp_path / "whole", "fedavg", rounds=4))
    run = interrupted(tmp_path / "r", "fedavg", at=2)
    path, outcomes = run.directory / "metrics.jsonl", set()
    for number, bit in enumerate(some_bits(path, 24)):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(run.directory, copy)
        notes = tiny.Notes()
        with flipped(copy / "metrics.jsonl", bit):
            with pytest.raises(FedkeelError, match=r"metrics.jsonl' was changed since .* checksum does not match"):
                Run(copy).records()
            try:
                done = tiny.resume(copy, observer=notes)
            except FedkeelError as error:
                assert "metrics.jsonl' is damaged, its checksum is not the one" in str(error)  # noqa: PT017
                outcomes.add("refused")
                continue
            assert "is not what it was then): going back to the one before it" in notes.notes[0]
            assert tiny.result(done) == whole
            outcomes.add("one round back")
    assert outcomes == {"refused", "one round back"}


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("summary.json", "remove it and write it again with 'fedkeel resume"),
        ("metrics.jsonl", "put it back from a copy, or start the run anew in another directory"),
        (
            "model.safetensors",
            "put it back from a copy, or remove summary.json and write it again with 'fedkeel resume",
        ),
        ("personal/scan.safetensors", "put it back from a copy, or remove summary.json and write it again"),
    ],
)
def test_the_commands_say_which_file_it_is_and_what_to_do(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, remedy: str
) -> None:
    run = str(finished.directory)
    export_it = ["export", run, "--client", "scan", "--out", str(tmp_path / "m.pt2")]
    commands = {"summary.json": [["show", run], ["resume", run], export_it], "metrics.jsonl": [["show", run]]}
    path = finished.directory / file
    for bit in (77, 8 * path.stat().st_size - 12):
        with flipped(path, bit):
            for command in (*commands.get(file, [export_it]), ["resume", run]):
                assert main(command) == 2
                said = capsys.readouterr().err.strip()
                assert said.count("\n") == 0
                assert Path(file).name in said
                if "cannot be read" not in said:
                    assert remedy in said


def test_what_is_said_helps(tmp_path: Path, finished: Run) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + b"\x7f")
    (tmp_path / "run" / "summary.json").unlink()
    fedkeel.resume(tmp_path / "run")
    assert path.read_bytes() == intact
    Run(tmp_path / "run").check()


def test_a_lost_file_is_told_like_a_damaged_one(tmp_path: Path, finished: Run) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(
        FedkeelError, match=r"model.safetensors' cannot be read \(No such file or directory\): put it back"
    ):
        Run(tmp_path / "run").model("scan")


@pytest.mark.parametrize("value", [2.12, -0.1])
def test_an_accuracy_of_more_than_all_is_refused_also_without_checksums(
    tmp_path: Path, finished: Run, value: float
) -> None:
    shutil.copytree(finished.directory, tmp_path / "run")
    (tmp_path / "run" / "checksums.json").unlink()
    path = tmp_path / "run" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "accuracy": value}))
    with pytest.raises(FedkeelError, match=f"its 'accuracy' is '{value}'"):
        _ = Run(tmp_path / "run").accuracy
    with pytest.raises(FedkeelError, match="its 'accuracy' is"):
        export(Run(tmp_path / "run"), tmp_path / "m.pt2", client="scan")
