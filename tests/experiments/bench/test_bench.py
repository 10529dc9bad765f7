"""The measuring itself, on scripted sides and on a network of a few weights. How fast anything is, is not tested."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.cli import main
from fedkeel.engine.optimizers import FusedSGD
from fedkeel.errors import FedkeelError
from fedkeel.experiments.bench import (
    ROWS,
    Benchmark,
    Executed,
    UsualLoop,
    bench,
    choose,
    made_up,
    measure,
    peers,
    sides,
)
from fedkeel.experiments.bench.measure import Result, fitted
from fedkeel.experiments.bench.sides import run_cell
from fedkeel.stopping import Stopped, stop_requested

TINY = Benchmark("simple_cnn(width=2)", 32, 4, 3, 2, 1, group="cpu", executors=("serial", "processes"), aim=1.5)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Script:
    """Sides whose speeds are written down, and what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **speeds: list[Any]) -> None:
        self.calls: list[str] = []
        self.closed: list[str] = []
        script = self

        class Side:
            def __init__(self, row: Benchmark, _: Any, executor: str = "usual", **options: Any) -> None:
                self.name = options.get("method", row.method) if row.against else executor
                self._speeds = iter(speeds[self.name])

            def speed(self) -> float:
                script.calls.append(self.name)
                value = next(self._speeds)
                if isinstance(value, type):
                    raise value
                return float(value)

            def close(self) -> None:
                script.closed.append(self.name)

        monkeypatch.setattr(measure, "UsualLoop", Side)
        monkeypatch.setattr(measure, "Executed", Side)
        monkeypatch.setattr(measure, "made_up", lambda _: None)
        monkeypatch.setattr(measure, "fitted", lambda row: row)


def test_sides_take_turns_and_the_ratio_is_the_median_over_the_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(
        monkeypatch,
        usual=[10, 10, 1, 10, 10],  # the third cycle was disturbed
        serial=[11, 12, 1, 13, 14],
        processes=[20, 30, 4, 40, 50],
    )
    report = bench({"tiny": TINY})
    assert script.calls == ["usual", "serial", "processes"] * 5
    assert sorted(script.closed) == ["processes", "serial", "usual"]
    serial, processes = report.results
    assert serial.ratio == pytest.approx(1.2)
    assert serial.aim is None
    assert processes.ratio == pytest.approx(4.0)
    assert processes.ratios == pytest.approx((2, 3, 4, 4, 5))
    assert (processes.other_speed, processes.our_speed) == (10, 30)
    assert processes.met is True


def test_a_cost_is_how_much_slower_the_method_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    Script(monkeypatch, fedavg=[300, 300, 300], greg=[200, 150, 100])
    result = bench({"greg": ROWS["greg"]}).results[0]
    assert result.ratio == pytest.approx(2.0)
    assert result.met is False
    assert (result.other, result.ours) == ("fedavg", "greg")


def test_an_aim_is_at_least_for_a_speed_at_most_for_a_cost_and_under_for_seconds() -> None:
    def met(group: str, **values: float) -> bool | None:
        return Result("r", group, "w", **values).met  # type: ignore[arg-type]

    assert met("gpu", ratio=45, aim=45) is True
    assert met("gpu", ratio=44.9, aim=45) is False
    assert met("cost", ratio=1.35, aim=1.35) is True
    assert met("cost", ratio=1.36, aim=1.35) is False
    assert met("cell", seconds=59.9, aim=60) is True
    assert met("cell", seconds=60, aim=60) is False
    assert met("gpu", ratio=45) is None


def test_compiled_rows_have_an_aim_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for options, aim in (({}, 45), ({"compile": True}, 60)):
        Script(monkeypatch, usual=[1, 1, 1], cuda=[50, 50, 50])
        assert bench({"small10": ROWS["small10"]}, options=options).results[0].aim == aim


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_this_machine_cannot_do_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.PLACE, str(tmp_path))
    report = bench({name: row for name, row in ROWS.items() if row.group != "cpu" or row.peer})
    reasons = {result.row: result.skipped for result in report.results}
    assert "benchmarks/cpu.py" in reasons.pop("pfl")
    assert "benchmarks/cpu.py" in reasons.pop("flower")
    assert len(reasons) == 12
    assert set(reasons.values()) == {"torch sees no GPU on this machine"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(torch.OutOfMemoryError, "too small"), (FedkeelError("The option does not fit."), "The option does not fit")],
)
def test_a_row_that_fails_does_not_take_the_others_with_it(
    monkeypatch: pytest.MonkeyPatch, error: Any, reason: str
) -> None:
    Script(monkeypatch, usual=[1] * 5, serial=[1] * 5, processes=[1] * 5)
    plain = measure.alternate

    def alternate(name: str, *rest: Any) -> None:
        if name == "bad":
            raise error
        plain(name, *rest)

    monkeypatch.setattr(measure, "alternate", alternate)
    results = bench({"bad": TINY, "good": TINY}).results
    assert reason in results[0].skipped
    assert results[0].met is None
    assert [result.row for result in results[1:]] == ["good", "good"]


def test_a_request_to_stop_leaves_what_was_measured_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, usual=[10, 10, 10], serial=[10, 20, Stopped], processes=[30, 50])
    report = bench({"first": TINY, "second": TINY})
    assert report.stopped
    assert [(r.row, r.ours, r.ratio) for r in report.results] == [
        ("first", "serial", pytest.approx(1.5)),
        ("first", "processes", pytest.approx(4.0)),
    ]
    assert sorted(script.closed) == ["processes", "serial", "usual"]


# -- the sides -------------------------------------------------------------------------------------------------------
def test_every_client_of_a_made_up_federation_has_the_steps_of_the_row() -> None:
    federation = made_up(TINY)
    assert [len(client.train) for client in federation.clients] == [8, 8, 8]
    taken = torch.cat([client.train for client in federation.clients])
    assert len(taken.unique()) == len(taken) == len(federation.images)


def test_both_sides_train_as_many_steps_as_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = made_up(TINY)
    steps = 0

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            return plain(*args, **kwargs)

        return step

    moments = iter([100.0, 103.0] * 10)
    for make in (lambda: UsualLoop(TINY, federation), lambda: Executed(TINY, federation, "serial")):
        side = make()
        with monkeypatch.context() as patched:
            for optimizer in (torch.optim.SGD, FusedSGD):
                patched.setattr(optimizer, "step", counting(optimizer.step))
            patched.setattr(sides.time, "perf_counter", lambda: next(moments))
            steps = 0
            assert side.speed() == pytest.approx(steps / 3)
        assert steps == TINY.clients * TINY.steps
        side.close()


def test_a_tiny_row_is_measured_in_this_process_and_in_workers() -> None:
    report = bench({"tiny": TINY}, quick=True)
    assert [(result.ours, result.other) for result in report.results] == [
        ("serial", "usual loop"),
        ("processes", "usual loop"),
    ]
    for result in report.results:
        assert not result.skipped
        assert result.ratio is not None
        assert result.ratio > 0
        assert result.met is None  # a few steps say nothing


def test_on_a_slow_machine_a_row_has_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for speed, steps in ((10_000.0, 32), (20.0, 8), (0.01, 2)):
        monkeypatch.setattr(measure.UsualLoop, "__init__", lambda *_: None)
        monkeypatch.setattr(measure.UsualLoop, "speed", lambda _, speed=speed: speed)
        assert fitted(ROWS["cpu4"]).steps == steps


@pytest.fixture
def _stopping() -> Iterator[None]:
    stop_requested.set()
    yield
    stop_requested.clear()


@pytest.mark.usefixtures("_stopping")
def test_the_usual_loop_too_stops_when_asked() -> None:
    with pytest.raises(Stopped):
        UsualLoop(TINY, made_up(TINY))


def test_the_cell_is_a_whole_run_of_a_hundred_clients() -> None:
    done = run_cell(rounds=1, images=1000, executor="serial", device="cpu", model="simple_cnn(width=2)")
    assert done["seconds"] > 0
    assert done["train"] > 0
    assert 0 <= done["accuracy"] <= 1


def test_rows_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert list(choose(["small10", "cpu4"])) == ["cpu4", "small10"]
    assert choose([]) == ROWS
    with pytest.raises(FedkeelError, match="There is no row named 'smal10': did you mean 'small10'"):
        choose(["cpu4", "smal10"])


# -- the command -----------------------------------------------------------------------------------------------------
def test_the_command_prints_a_table_and_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(monkeypatch, usual=[10] * 5, serial=[9] * 5, processes=[25] * 5)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    assert main(["bench", "cpu4", "pfl", "greg", "--json", str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert any(line.split()[-6:] == ["25", "2.50", "2.50", "2.50", "1.5", "yes"] for line in lines)
    assert any("Skipped pfl: " in line for line in lines)
    assert "Skipped greg: torch sees no GPU on this machine." in lines
    assert "busy before it began (load 99)" in printed.out
    assert lines[-1].endswith(f"torch {torch.__version__}; {measure.datetime.date.today().isoformat()}")
    assert "cpu4: warming up" in printed.err
    document = json.loads((tmp_path / "b.json").read_text())
    assert [(entry["row"], entry["met"]) for entry in document["results"]] == [
        ("cpu4", None),
        ("cpu4", True),
        ("pfl", None),
        ("greg", None),
    ]


def test_ctrl_c_leaves_a_partial_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, usual=[10, Stopped], serial=[10], processes=[25])
    assert main(["bench", "cpu4", "cpu32", "--quiet"]) == 130
    printed = capsys.readouterr()
    assert "2.50" in printed.out
    assert "cpu32" not in printed.out
    assert "stopped" in printed.err


def test_rows_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ROWS:
        assert any(line.split()[:1] == [name] for line in lines), name
    assert any("cpu32" in line and line.rstrip().endswith("yes") for line in lines)
    assert any("at most 1.35" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cpu5"], "There is no row named 'cpu5': did you mean 'cpu4'?"),
        (["--set", "workers"], "'--set workers' is not an option: write it like '--set workers=8'."),
        (["--set", "worker=2"], "There is no option 'worker': did you mean 'workers'?"),
        (["--set", "method=gn"], "'--set method=gn' sets 'method', which the row itself sets: leave it out."),
        (["--set", "workers=-1"], "'workers' is -1: give at least 0."),
        (["--json", "/nowhere/at/all/b.json"], "its folder does not exist."),
    ],
)
def test_mistakes_are_told_in_one_sentence_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err
