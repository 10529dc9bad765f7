from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fedkeel
from fedkeel.config import Config
from fedkeel.core import naming
from fedkeel.engine.checkpointing import Checkpoint
from fedkeel.errors import StoreError
from fedkeel.files import plain
from fedkeel.runs.run import Run
from fedkeel.runs.store import Store, fingerprint, read_checkpoint, read_config
from tests import tiny


def store(path: Path) -> Store:
    made = Store.create(path, Config())
    made.append({"kind": "begun"})
    return made


def checkpoint(round: int) -> Checkpoint:
    groups = {"weights": {"b": torch.full((2,), float(round)), "a": torch.ones(1)}, "memory": {}}
    return Checkpoint(round, groups, {"accuracy": 0.5, "round": round})


def test_the_configuration_is_stored_and_read(tmp_path: Path) -> None:
    config = Config(method="fedprox(mu=0.1)", seed=3)
    Store.create(tmp_path / "run", config).close()
    assert read_config(tmp_path / "run") == config
    with pytest.raises(StoreError, match="is not a run directory"):
        read_config(tmp_path)


def test_a_checkpoint_comes_back_as_it_was_whatever_clients_are_called(tmp_path: Path) -> None:
    s = store(tmp_path / "run")
    names = ["ward", "header", "a//b", "ward/3", "café", ""]
    clients = {name: {"local/z": torch.tensor([i]), "local/a": torch.rand(2)} for i, name in enumerate(names)}
    s.append({"kind": "round"})
    for name, tensors in clients.items():
        s.memory.keep(name, tensors)
    s.checkpoint(Checkpoint(4, checkpoint(4).groups, {"accuracy": 0.25, "round": 2}))
    s.close()
    s = Store.open(tmp_path / "run")
    loaded = s.latest(pytest.fail)
    assert loaded is not None
    assert (loaded.round, loaded.best) == (4, {"accuracy": 0.25, "round": 2})
    assert list(loaded.groups["weights"]) == ["b", "a"]
    remembered = dict(s.memory.items())
    assert {*remembered} == {*names}
    for name, tensors in clients.items():
        assert list(remembered[name]) == list(tensors)
        assert all(torch.equal(remembered[name][key], t) for key, t in tensors.items())
    s.close()


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    s = store(tmp_path / "run")
    for round in range(4):
        s.checkpoint(checkpoint(round))
    s.close()
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["round-000002", "round-000003"]


def test_checkpoints_of_a_future_that_was_given_up_go(tmp_path: Path) -> None:
    s = store(tmp_path / "run")
    for round in (7, 8):
        s.checkpoint(checkpoint(round))
    for round in (0, 1, 2):
        s.checkpoint(checkpoint(round))
        assert s.latest(pytest.fail).round == round  # type: ignore[union-attr]
    s.close()
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["round-000001", "round-000002"]


def test_records_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    s = store(tmp_path / "run")
    s.append({"kind": "round", "round": 0})
    s.checkpoint(checkpoint(0))
    s.append({"kind": "round", "round": 1})
    s.close()
    s = Store.open(tmp_path / "run")
    assert s.latest(pytest.fail) is not None
    s.append({"kind": "again"})
    s.close()
    assert [r["kind"] for r in Run(tmp_path / "run").records()] == ["begun", "round", "again"]


def test_any_flipped_byte_of_the_description_is_noticed(tmp_path: Path) -> None:
    s = store(tmp_path / "run")
    s.checkpoint(checkpoint(0))
    s.close()
    path = tmp_path / "run" / "checkpoints" / "round-000000" / "checkpoint.json"
    intact = path.read_bytes()
    assert Store(tmp_path / "run", Config()).latest(pytest.fail) is not None
    for byte in range(len(intact)):
        data = bytearray(intact)
        data[byte] ^= 1
        path.write_bytes(data)
        notes: list[str] = []
        assert Store(tmp_path / "run", Config()).latest(notes.append) is None, bytes(data)
        assert "round-000000' is damaged" in notes[0]


def damage_truncated(folder: Path) -> None:
    path = folder / "server.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def damage_flipped(folder: Path) -> None:
    flip(folder / "server.safetensors")


def damage_memory_missing(folder: Path) -> None:
    max((folder.parent.parent / "memory").glob("*/000002.safetensors")).unlink()


def damage_missing(folder: Path) -> None:
    (folder / "server.safetensors").unlink()


def damage_description(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{}")


def damage_empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


DAMAGES = [
    damage_truncated,
    damage_flipped,
    damage_missing,
    damage_description,
    damage_empty,
    damage_memory_missing,
]


def stopped(path: Path, method: str = "fedbn", at: int = 2, **options: Any) -> Run:
    """A run that was interrupted after round `at`."""

    def stop(round: int) -> None:
        if round == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(path, method, rounds=4, observer=tiny.Notes(stop), **options)
    return Run(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tiny.result(tiny.run(tmp_path_factory.mktemp("whole") / "run", "fedbn", rounds=4))


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None], whole: dict[str, bytes]
) -> None:
    run = stopped(tmp_path / "run")
    damage(run.directory / "checkpoints" / "round-000002")
    notes = tiny.Notes()
    assert tiny.result(tiny.resume(run.directory, observer=notes)) == whole
    assert notes.first == 2
    assert len(notes.notes) == 1
    assert "round-000002' is damaged" in notes.notes[0]
    assert "going back to the one before it" in notes.notes[0]


def test_with_both_damaged_the_run_starts_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    run = stopped(tmp_path / "run")
    for folder in (run.directory / "checkpoints").iterdir():
        damage_truncated(folder)
    notes = tiny.Notes()
    assert tiny.result(tiny.resume(run.directory, observer=notes)) == whole
    assert notes.first == 0
    assert notes.notes[-1] == "No checkpoint is usable: starting again from the first round."


def test_without_checkpoints_or_with_short_metrics_the_run_starts_again(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    run = stopped(tmp_path / "a")
    shutil.rmtree(run.directory / "checkpoints")
    assert tiny.result(tiny.resume(run.directory)) == whole
    run = stopped(tmp_path / "b")
    (run.directory / "metrics.jsonl").write_bytes(b"")
    notes = tiny.Notes()
    assert tiny.result(tiny.resume(run.directory, observer=notes)) == whole
    assert "is not what it was then" in notes.notes[0]


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    path = run.directory / "config.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.05", "learning_rate = 0.06"))
    with pytest.raises(StoreError, match="is of another configuration than") as caught:
        tiny.resume(run.directory)
    assert "\n" not in str(caught.value)


def test_executor_and_workers_may_change_when_a_run_is_resumed() -> None:
    same = Config(executor="serial", workers=3, device="cpu", checkpoint_every=9)
    assert fingerprint(same) == fingerprint(Config())
    assert fingerprint(Config(seed=1)) != fingerprint(Config())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    with pytest.raises(StoreError, match="are of another model than the one given"):
        tiny.resume(run.directory, network=tiny.model(width=5))


def test_a_used_directory_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=1)
    before = tiny.result(run)
    with pytest.raises(StoreError, match="already holds a run: continue it with 'fedkeel resume"):
        tiny.run(tmp_path / "run", rounds=1)
    assert tiny.result(run) == before


def test_two_processes_on_one_directory_are_refused(tmp_path: Path) -> None:
    s = store(tmp_path / "run")

    def other(pipe: Any) -> None:
        messages = []
        for attempt in (lambda: Store.open(tmp_path / "run"), lambda: Store.create(tmp_path / "run", Config())):
            try:
                attempt()
                messages.append("")
            except StoreError as error:
                messages.append(str(error))
        pipe.send(messages)

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=other, args=(there,))
    process.start()
    expected = f"Another process is running '{tmp_path / 'run'}': wait for it or stop it."
    assert here.recv() == [expected, expected]
    process.join()
    s.close()
    Store.open(tmp_path / "run").close()


def test_a_run_needs_nothing_that_only_posix_systems_have(tmp_path: Path) -> None:
    hidden = ("fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "syslog")
    code = f"""
import os, sys
sys.modules.update(dict.fromkeys({hidden}))
import torch
for name in ("fork", "sched_getaffinity", "getuid", "killpg", "mkfifo"):
    delattr(os, name)
import fedkeel
options = dict(rounds=1, subsample=10, model="simple_cnn(width=2)", executor="serial", device="cpu")
fedkeel.simulate(directory="run", **options)
fedkeel.resume("run", rounds=2)
print(fedkeel.Run("run"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert fedkeel.load(tmp_path / "run").labels[0] == "0"


def test_a_forked_worker_does_not_hold_the_directory(tmp_path: Path) -> None:
    s = store(tmp_path / "run")
    reading, writing = os.pipe()
    began, beginning = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(beginning, b"!")
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.read(began, 1)
    s.close()
    Store.open(tmp_path / "run").close()  # although the child, forked while it was held, still lives
    os.close(writing)
    os.waitpid(child, 0)


def test_a_path_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written: .*choose another") as caught:
        tiny.run(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


def test_a_read_only_directory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="cannot be written: Read-only file system"):
        tiny.run(tmp_path / "run")


def test_a_disk_that_is_full_from_the_start_is_one_sentence(tmp_path: Path) -> None:
    """The real error of the system: everything written to /dev/full fails."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    s = store(tmp_path / "run")
    with pytest.raises(StoreError, match="No space left on device"):
        s.flush()
    s.close()  # tries to write again, and must not raise anything else


def test_a_disk_that_fills_up_is_one_sentence_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    from fedkeel.runs import store as module

    plain, calls = module.write_durably, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > 5:  # two files a round
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        plain(path, data)

    monkeypatch.setattr(module, "write_durably", full)
    with pytest.raises(StoreError, match="cannot be written: No space left on device; make room") as caught:
        tiny.run(tmp_path / "run", "fedbn", rounds=4)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(module, "write_durably", plain)
    notes = tiny.Notes()
    assert tiny.result(tiny.resume(tmp_path / "run", observer=notes)) == whole
    assert notes.first == 2


def test_nothing_is_pickled(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", "fedbn", rounds=1)
    suffixes = {path.suffix for path in run.directory.rglob("*") if path.is_file() and path.name != ".lock"}
    assert suffixes == {".toml", ".jsonl", ".json", ".safetensors"}
    header, loaded = read_checkpoint(run.directory / "checkpoints" / "round-000000")
    assert header["round"] == loaded.round == 0


def test_numbers_that_json_does_not_know_are_stored_as_null() -> None:
    assert plain({"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": 2}}) == {
        "a": None,
        "b": [1.0, None],
        "c": {"d": 2},
    }


def test_what_clients_keep_is_stored_inside_of_the_run_whatever_they_are_called(tmp_path: Path) -> None:
    names = ["../../evil", "/etc/evil", "..", ".", "", "a/b", "a%2Fb", "a\0b", "Zürich", "[/b]", "x" * 300, "x" * 301]
    s = store(tmp_path / "deep" / "run")
    s.finish({}, {"w": torch.ones(1)}, [(name, {"w": torch.tensor([i])}) for i, name in enumerate(names)])
    s.close()
    folder = tmp_path / "deep" / "run" / "personal"
    assert {path for path in tmp_path.rglob("*") if "personal" not in str(path)} == {
        tmp_path / "deep",
        tmp_path / "deep" / "run",
        *(path for path in (tmp_path / "deep" / "run").iterdir() if path.name != "personal"),
    }
    assert len(list(folder.iterdir())) == len(names)
    for i, name in enumerate(names):
        path = folder / f"{naming.file_name(name)}.safetensors"
        assert path is not None
        assert safetensors.torch.load_file(path)["w"].tolist() == [i]
