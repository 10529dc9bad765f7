"""The queue: what is missing, in which order, and that a slice ends in time and goes on."""

import json
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.experiments import jobs, queue
from fedkeel.experiments.jobs import Job, JobsObserver, JobsObservers
from fedkeel.experiments.ledger import Ledger
from fedkeel.experiments.queue import (
    Block,
    Budget,
    alone,
    expected,
    leave_what_is_missing,
    read_queue,
    read_seconds,
    work,
)
from fedkeel.experiments.reproduce import TableRuns
from fedkeel.experiments.request import Request
from fedkeel.stopping import Stopped, stop_requested
from tests.experiments.lines import RECIPE, line, small


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return Request(directory=tmp_path / "runs", ledger=tmp_path / "results", jobs=1)


def missing(block: Block, ledger: Ledger, request: Request) -> TableRuns:
    table = block.table(request)
    leave_what_is_missing(table, ledger)
    return table


def names(planned: list[Job]) -> list[str]:
    return [str(job) for job in planned]


class TestMissing:
    def test_seed_by_seed_without_what_is_there(self, recipe: str, request_: Request, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "results")
        ledger.add(line("GN", column, 0, 50.0) for column in ("digits scan", "digits paper"))
        ledger.add([line("FedAvg", "digits scan", 1, 50.0)])  # the other column of that run is not there
        table = missing(Block(recipe, seeds=2), ledger, request_)
        wanted = ["FedAvg, digits scan seed 0", "FedAvg, digits scan seed 1", "GN, digits scan seed 1"]
        assert names(table.jobs) == wanted

    def test_every_row_has_a_seed_before_one_has_two(self, recipe: str, request_: Request, tmp_path: Path) -> None:
        table = missing(Block(recipe, seeds=2), Ledger(tmp_path / "results"), request_)
        assert [(job.label.partition(",")[0], job.seed) for job in table.jobs] == [
            *(("FedAvg", 0), ("GN", 0)),
            *(("FedAvg", 1), ("GN", 1)),
        ]

    def test_stale_quick_and_changed_lines_do_not_count(self, recipe: str, request_: Request, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "results")
        for other in ({"version": "of before"}, {"rounds": 1}, {"changes": {"precision": "float32"}}):
            ledger.add(line("GN", column, 0, 50.0, **other) for column in ("digits scan", "digits paper"))
        assert names(missing(Block(recipe, only=["GN"], seeds=1), ledger, request_).jobs) == ["GN, digits scan seed 0"]
        block = Block(recipe, only=["GN"], seeds=1, changes={"precision": "float32", "device": "cpu", "batch_size": 5})
        assert missing(block, ledger, request_).jobs == []  # a device, and what the recipe has already, are no changes


class TestBudget:
    def test_a_run_is_expected_to_take_as_long_as_those_most_like_it(
        self, recipe: str, request_: Request, tmp_path: Path
    ) -> None:
        ledger = Ledger(tmp_path / "results")
        table = missing(Block(recipe, seeds=1), ledger, request_)
        fedavg, gn = table.jobs
        assert expected(gn, table, ledger) is None
        ledger.add([line("FedAvg", "digits scan", 5, 50.0, seconds=8.0), line("GN", "digits paper", 5, 50.0, rounds=1)])
        assert expected(fedavg, table, ledger) == 8.0
        assert expected(gn, table, ledger) == 20.0  # ten seconds for the one round that it had
        gn.directory.mkdir(parents=True)
        (gn.directory / "timing.jsonl").write_text('{"round": 0, "train": 9.5}\n')
        assert expected(gn, table, ledger) == 10.0  # the first of its two rounds is done

    def test_what_fits_goes_first_and_nothing_is_left_out(self, tmp_path: Path) -> None:
        budget = Budget(3600.0)
        short, long, unknown = (Job(name, 0, tmp_path / name, small().config(*next(small().cells()))) for name in "slu")
        budget.expected = {short.directory: 10.0, long.directory: 36000.0, unknown.directory: None}
        assert [budget.fits(job) for job in (short, long, unknown)] == [True, False, True]
        assert Budget(None).fits(long)
        assert budget.total([short, long]) == 36010.0
        assert budget.total([short, unknown]) is None

    @pytest.mark.parametrize(("text", "seconds"), [("25m", 1500), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800)])
    def test_times(self, text: str, seconds: float) -> None:
        assert read_seconds(text) == seconds

    @pytest.mark.parametrize("text", ["25", "m", "25 m", "an hour", ""])
    def test_what_is_no_time(self, text: str) -> None:
        with pytest.raises(FedkeelError, match="give a time like 25m"):
            read_seconds(text)


def test_runs_that_do_not_fit_wait_for_those_that_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small().config(*next(small().cells()))
    todo = [Job(name, 0, tmp_path / name, config) for name in ("long", "short", "longer", "shorter")]
    done: list[str] = []
    monkeypatch.setattr(jobs, "execute", lambda job, _: done.append(job.label))
    assert jobs.run_all(todo, 1, JobsObserver(), lambda job: "short" in job.label) == {}
    assert done == ["short", "shorter", "long", "longer"]


class Started(JobsObserver):
    """Which runs were started, and where they began."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def job_started(self, job: Job, first_round: int) -> None:
        self.started.append(f"{job} from {first_round}")


def hangs(pipe: Connection, *_: object) -> None:
    """In place of a run's process: it begins and then hears nothing, not even that it should stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send(("job_started", 0))
    while True:
        signal.pause()


def test_runs_that_do_not_stop_are_ended_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(jobs, "_work", hangs)

    class Clock(Started):
        def job_started(self, job: Job, first_round: int) -> None:
            super().job_started(job, first_round)
            now[0] = 95.0 if len(self.started) == 1 else 100.0  # first they are asked to stop

    watching = Clock()
    todo = [Job(name, 0, tmp_path / name, small().config(*next(small().cells()))) for name in "ab"]
    with pytest.raises(Stopped):
        jobs.run_all(todo, 2, JobsObservers([watching, Budget(100.0)]))
    assert len(watching.started) == 2
    assert not multiprocessing.active_children()


def test_a_run_that_dies_of_being_told_to_stop_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(pipe: Connection, *_: object) -> None:
        pipe.send(("job_started", 0))
        signal.pause()

    finished: list[str] = []

    class Stopping(JobsObserver):
        def job_started(self, job: Job, first_round: int) -> None:
            stop_requested.set()

        def job_finished(self, job: Job, problem: str) -> None:
            finished.append(problem)

    monkeypatch.setattr(jobs, "_work", deaf)
    todo = [Job(name, 0, tmp_path / name, small().config(*next(small().cells()))) for name in "ab"]
    with pytest.raises(Stopped):
        jobs.run_all(todo, 2, Stopping())
    stop_requested.clear()
    assert finished == []


class TestWork:
    @pytest.mark.slow
    def test_a_slice_ends_and_the_next_goes_on(
        self, recipe: str, request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blocks = [Block(recipe, seeds=1)]
        watching = Started()
        now = [0.0]
        monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: now[0]))

        class Clock(Started):
            def job_started(self, job: Job, first_round: int) -> None:
                watching.job_started(job, first_round)
                if job.label.startswith("GN"):
                    now[0] = 1000.0

        first = work(blocks, Request(**{**vars(request_), "observer": Clock()}), budget=100.0)
        assert watching.started == ["FedAvg, digits scan seed 0 from 0", "GN, digits scan seed 0 from 0"]
        assert (first.written, first.left) == (2, 1)
        assert not stop_requested.is_set()
        assert {entry.row for entry in Ledger(tmp_path / "results")} == {"FedAvg"}
        second = work(blocks, Request(**{**vars(request_), "observer": watching}), budget=None)
        assert (second.written, second.left) == (2, 0)
        assert len(watching.started) == 3
        assert {entry.row for entry in Ledger(tmp_path / "results")} == {"FedAvg", "GN"}
        assert work(blocks, request_).written == 0

    def test_blocks_are_looked_into_as_far_as_there_is_time(
        self, recipe: str, request_: Request, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]
        monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(queue, "AT_LEAST", 1)
        looked: list[str] = []

        def slowly(table: TableRuns, ledger: Ledger) -> None:
            looked.append(table.recipe.name)
            now[0] += 60.0
            leave_what_is_missing(table, ledger)

        monkeypatch.setattr(queue, "leave_what_is_missing", slowly)
        done = work([Block(recipe, only=["GN"], seeds=1), Block(recipe, seeds=3)], request_, budget=50.0)
        assert looked == ["small"]
        assert (done.written, done.left, done.blocks_left) == (0, 1, 1)
        assert not stop_requested.is_set()

    @pytest.mark.slow
    def test_what_was_finished_when_a_slice_was_cut_off_is_written(
        self, recipe: str, request_: Request, tmp_path: Path
    ) -> None:
        blocks = [Block(recipe, only=["GN"], seeds=1)]
        work(blocks, request_)
        (tmp_path / "results" / "small.jsonl").unlink()
        watching = Started()
        assert work(blocks, Request(**{**vars(request_), "observer": watching})).written == 2
        assert watching.started == []


class TestCommand:
    @pytest.mark.slow
    def test_from_the_shell(
        self, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("results").mkdir()
        Path("results/queue.toml").write_text(f'[[block]]\nrecipe = "{recipe}"\nonly = ["GN"]\nseeds = 1\n')
        assert main(["reproduce", "--missing", "--budget", "10m", "--quiet", "--jobs", "1", "--json"]) == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["written"], done["left"]) == (2, 0)
        assert main(["reproduce", "--missing", "--quiet"]) == 0
        assert "Nothing of the queue is left." in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--missing"], "The queue 'results/queue.toml' cannot be read"),
            (["--budget", "2m", "hbn/table1"], "give --missing too"),
            (["--missing", "hbn/table1"], "takes its cells from the queue"),
            (["--missing", "--rounds", "3"], "leave 'rounds' out"),
            (["--missing", "--scale", "0.5"], "leave 'scale' out"),
            (["--missing", "--budget", ""], "cannot be read"),
        ],
    )
    def test_what_cannot_be_meant(
        self,
        words: list[str],
        told: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["reproduce", *words]) == 2
        assert told in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "is no queue"),
            ("block = 3", "is no queue"),
            ('[block]\nrecipe = "hbn/table1"', "is no queue"),
            ('block = ["x"]', "Block 1 of .* needs a recipe"),
            ('[[block]]\nonly = ["HBN"]\n', "needs a recipe"),
            ('[[block]]\nrecipe = "hbn/table1"\nseed = 1\n', "has no 'seed'"),
            ('[[block]]\nrecipe = "hbn/table1"\nonly = [3]\n', "'only' is"),
            ('[[block]]\nrecipe = "hbn/table1"\nonly = "HBN"\n', "'only' is"),
            ('[[block]]\nrecipe = "hbn/table1"\nwith = 3\n', "'with' is"),
            ('[[block]]\nrecipe = "hbn/table1"\nwith = { seed = 3 }\n', "'with' is"),
        ],
    )
    def test_a_queue_that_is_none(self, text: str, told: str, tmp_path: Path) -> None:
        path = tmp_path / "queue.toml"
        path.write_text(text)
        with pytest.raises(FedkeelError, match=told):
            read_queue(path)


def test_a_second_queue_is_refused(recipe: str, request_: Request, tmp_path: Path) -> None:
    with alone(tmp_path / "results"), pytest.raises(FedkeelError, match="Another queue is at work"):
        work([Block(recipe, only=["GN"], seeds=1)], request_)
    with alone(tmp_path / "results"):  # it is free again
        pass


def test_a_ledger_that_is_a_file_is_told_before_anything_runs(recipe: str, request_: Request, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    started = Started()
    with pytest.raises(FedkeelError, match="results"):
        work([Block(recipe, only=["GN"], seeds=1)], Request(**{**vars(request_), "observer": started}))
    assert started.started == []


def test_a_mistake_in_the_last_block_is_told_before_anything_runs(recipe: str, request_: Request) -> None:
    started = Started()
    blocks = [Block(recipe, only=["GN"], seeds=1), Block(recipe, only=["NG"])]
    with pytest.raises(FedkeelError, match="'NG' is no row and no column"):
        work(blocks, Request(**{**vars(request_), "observer": started}))
    assert started.started == []


def test_the_projects_own_queue_names_what_there_is() -> None:
    path = Path(__file__).parents[2] / "results" / "queue.toml"
    tables = [block.table(Request()) for block in read_queue(path)]
    assert all(table.rows and table.columns for table in tables)
