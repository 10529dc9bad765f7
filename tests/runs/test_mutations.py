"""Whatever a stranger changes in a run directory: a sentence that names the file, or the run as it was."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import fedkeel
from fedkeel.cli import main
from tests import tiny
from tests.runs.test_run import interrupted

pytestmark = pytest.mark.slow

DEEP = "[" * 100_000
VALUES = ["text", "\ud800", "", None, True, -1, 10**400, float("nan"), float("inf"), 1e300, [], {}, [[]], {"a": None}]
MANY = 5  # changes to each file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mutations")
    options: dict[str, Any] = {
        **tiny.OPTIONS,
        "rounds": 2,
        "data": "digits-shift",
        "subsample": 10,
        "model": "simple_cnn(width=2)",
        "method": "fedavg",
    }
    fedkeel.simulate(options, directory=folder / "finished", predictions=True, metrics="brier")
    fedkeel.simulate(options, directory=folder / "extended")
    fedkeel.resume(folder / "extended", rounds=3)
    interrupted(folder / "stopped", "fedbn")
    return {path.name: path for path in folder.iterdir()}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in it, with a key."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from places(inner)


def mutated(data: bytes, name: str, draw: random.Random) -> bytes:
    """A bit, a piece, or a value of it is another."""
    kind = draw.choice(
        ["bit", "cut", "bytes", *["value"] * 6]
        if name.endswith((".json", ".jsonl"))
        else ["bit", "cut", "bytes", "line"]
    )
    if kind == "bit":
        place = draw.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    if kind == "cut":
        return data[: draw.randrange(len(data))]
    if kind == "bytes":
        return draw.choice([b"", b"\xff\xfe", b"null", b"[]", b"{}", b"1", DEEP.encode(), b'{"a": ' * 50_000])
    lines = data.split(b"\n") if name.endswith((".jsonl", ".toml")) else [data]
    number = draw.randrange(len(lines))
    if kind == "line" or not lines[number].strip():
        lines[number] = draw.choice(
            [b"rounds = 1" + b"0" * 400, b"seed = nan", b"method = 3", b"= ", b"data = 'x('", b""]
        )
        return b"\n".join(lines)
    table = json.loads(lines[number])
    holder, key = draw.choice([*places(table)] or [([table], 0)])
    if draw.random() < 0.15 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)
    lines[number] = json.dumps(table).encode()
    return b"\n".join(lines)


def commands(run: Path, picture: Path) -> Iterator[list[str]]:
    yield ["show", str(run), "--details"]
    yield ["watch", str(run), "--json"]
    yield ["predict", str(run), str(picture)]
    yield ["resume", str(run), "--quiet"]


@pytest.mark.parametrize("which", ["finished", "extended", "stopped"])
def test_a_changed_file_is_told_in_one_sentence_or_changes_nothing(
    which: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    files = sorted(
        path.relative_to(runs[which]) for path in runs[which].rglob("*") if path.is_file() and path.stat().st_size
    )
    checked = json.loads((runs[which] / "checksums.json").read_text())["sha256"] if which != "stopped" else {}
    for file in files:
        draw, data = random.Random(f"{which} {file}"), (runs[which] / file).read_bytes()
        for number in range(MANY):
            copy = tmp_path / "run"
            shutil.copytree(runs[which], copy)
            changed = mutated(data, file.name, draw)
            (copy / file).write_bytes(changed)
            said = []
            for words in commands(copy, tmp_path / "a.png"):
                code = main(words)
                told = capsys.readouterr().err.rstrip("\n")
                if code == 2:
                    said.append(told)
                    assert "\n" not in told.rpartition("fedkeel: ")[2], (file, number, words, told)
                    assert "Traceback" not in told
            if str(file) in checked and changed != data and file.suffix != ".csv":
                assert any(str(file) in sentence for sentence in said), (file, number, said)
            shutil.rmtree(copy)
