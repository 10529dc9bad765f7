"""The command: what a person types, what comes back, and with which exit code."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedkeel import cli
from fedkeel.cli import build_parser, main
from fedkeel.cli.list import KINDS
from fedkeel.cli.terminal.parsing import given_options, with_options
from fedkeel.config import Config, option_names
from fedkeel.errors import FedkeelError
from fedkeel.methods import METHODS
from fedkeel.runs.run import Run
from tests.experiments.made_up import finish

COMMANDS = sorted(path.stem for path in Path(cli.__file__).parent.glob("[a-z]*.py"))
GREET = '''"""Greet a site.

examples:
  fedkeel greet --name north
"""

HELP = "greet a site"


def add_arguments(parser):
    parser.add_argument("--name", metavar="NAME", help="of the site")


def run(arguments):
    print("hello", arguments.name)
    return 0
'''
TINY = ["--subsample", "10", "--model", "simple_cnn(width=2)", "--executor", "serial", "--device", "cpu"]


def typed(*words: str) -> dict[str, object]:
    return given_options(build_parser().parse_args(["run", *words]))


class TestOptions:
    def test_every_option_of_a_run_is_a_flag(self) -> None:
        arguments = vars(build_parser().parse_args(["run"]))
        assert set(option_names()) <= set(arguments)

    def test_flags_become_values_of_their_kind(self) -> None:
        given = typed("--rounds", "3", "--learning-rate", "1e-2", "--stateless", "--no-drop-last", "--method", "gn")
        assert given == {"rounds": 3, "learning_rate": 0.01, "stateless": True, "drop_last": False, "method": "gn"}

    @pytest.mark.parametrize("command", [["run"], ["compare", "fedavg", "gn"], ["tune", "fedavg"]], ids=" ".join)
    def test_a_flag_that_does_nothing_is_refused_at_its_default_too(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*command, "--dp-noise", "1.0"]) == 2
        assert "'dp_noise' does nothing without --dp" in capsys.readouterr().err

    def test_flags_override_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        file.write_text('rounds = 7\nlearning-rate = 0.5\nmethod = "gn"\n')
        given = typed("--config", str(file), "--rounds", "3")
        assert given == {"rounds": 3, "learning_rate": 0.5, "method": "gn"}

    def test_the_configuration_of_a_run_can_be_given_back(self, tmp_path: Path) -> None:
        config = Config(method="fedprox(mu=0.1)", learning_rate=1e-5, unseen="scan")
        (tmp_path / "config.toml").write_text(config.to_toml())
        assert Config(**typed("--config", str(tmp_path / "config.toml"))) == config  # type: ignore[arg-type]

    def test_root_goes_into_the_data_set(self) -> None:
        assert typed("--data", "folder(size=64)", "--root", "./a b")["data"] == "folder(size=64, root='./a b')"
        with pytest.raises(FedkeelError, match="twice"):
            with_options("folder(root=x)", root="y")

    def test_a_reproduction_has_the_recipe_s_settings_for_its_defaults(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["reproduce", "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "communication rounds (default: the recipe's)" in said
        assert "(default: 30)" not in said

    def test_help_shows_defaults_and_examples(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "--help"]) == 0
        text = capsys.readouterr().out
        assert "(default: 30)" in text
        assert "local training:" in text
        assert "examples:" in text
        commands = ["compare", "tune", "resume", "show", "demo", "list", "data", "data describe"]
        for command in commands:
            assert main([*command.split(), "--help"]) == 0
            assert "examples:" in capsys.readouterr().out


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (["rnu"], "did you mean 'run'?"),
            (["run", "--rouns", "3"], "did you mean '--rounds'?"),
            (["run", "--learning_rate=3"], "did you mean '--learning-rate'?"),
            (["run", "--zzzzzz"], "see 'fedkeel run --help'."),
            (["run", "--foo"], "see 'fedkeel run --help'."),
            (["run", "--lr", "0.1"], "did you mean '--learning-rate'?"),
            (["run", "--device", "gpu"], "give auto, cpu, cuda or cuda:N"),
            (["run", "fedbn"], "did you mean '--method fedbn'?"),
            (["run", "--rounds"], "--rounds expected one argument"),
            (["run", "--rounds", "ten"], "'rounds' is 'ten', which is not a whole number"),
            (["run", "--rounds", "0"], "'rounds' is 0: give at least 1."),
            (["run", "--rounds", "-1"], "'rounds' is -1: give at least 1."),
            (["run", "--batch-size", "0"], "'batch_size' is 0"),
            (["run", "--learning-rate", "0"], "'learning_rate' is 0"),
            (["run", "--learning-rate", "nan"], "finite"),
            (["run", "--schedule", "cosin"], "did you mean 'cosine'?"),
            (["run", "--config", "/nowhere.toml"], "cannot be read"),
            (["run", "--method", "fedavgg"], "did you mean 'fedavg'?"),
            (["run", "--method", "fedprox(nu=1)"], "did you mean 'mu'?"),
            (["run", "--model", "simple_cn"], "did you mean 'simple_cnn'?"),
            (["run", "--data", "digits-shif"], "did you mean 'digits-shift'?"),
            (["run", "--unseen", "scn"], "did you mean 'scan'?"),
            (["run", "--executor", "seral"], "did you mean 'serial'?"),
            (["compare"], "'fedkeel compare' lacks METHOD"),
            (["compare", "fedavg", "fedbnn"], "did you mean 'fedbn'?"),
            (["compare", "fedavg", "--seeds", "x"], "'seeds' is 'x'"),
            (["compare", "fedavg", "--jobs", "x"], "'jobs' is 'x'"),
            (["compare", "fedavg@round=3"], "did you mean 'rounds'?"),
            (["compare", "fedavg@foo=3"], "There is no option 'foo': see 'fedkeel run --help'."),
            (["compare", "fedavg@lr=3"], "did you mean 'learning_rate'?"),
            (["compare", "fedavg", "--method", "gn"], "methods have no flag, as in 'fedkeel compare fedavg greg'."),
            (["compare", "--methods", "fedavg", "gn"], "methods have no flag, as in 'fedkeel compare fedavg greg'."),
            (["compare", "fedavg", "--unseeen", "scan"], "did you mean '--unseen'?"),
            (["data", "show", "digits-shift", "-o", "sheet.doc"], "call it 'sheet.png'."),
            (["compare", "fedavg", "--seed", "1"], "did you mean '--seeds'?"),
            (["tune"], "'fedkeel tune' lacks METHOD"),
            (["tune", "fedavg", "--trials", "0"], "'trials' is '0': give a whole number, at least 1."),
            (["tune", "fedavg", "--space", "lr=log(0.1, 1)"], "did you mean 'learning_rate'?"),
            (["tune", "fedavg", "--space", "learning_rate=log(0, 1)"], "write it like learning_rate=log(0.001, 0.3)"),
            (["tune", "fedavg", "--space", "greg.alpha=[1]"], "'greg' is in none of the methods 'fedavg'"),
            (["tune", "fedavg", "--seeds", "0,1"], "The seed 0 is the search's"),
            (["tune", "fedavg", "--seeds", "x"], "'seeds' is 'x'"),
            (["tune", "fedavgg"], "did you mean 'fedavg'?"),
            (["tune", "fedavg", "--seed", "1"], "did you mean '--seeds'?"),
            (["tune", "fedavg", "--evaluate-on", "test"], "has no option '--evaluate-on'"),
            (["demo", "--quick", "--seeds", "5"], "'--quick' has one seed: leave one of them out."),
            (["demo", "--quick", "--seeds", "3"], "'--seeds' is given"),
            (["watch", ".", "--json", "--port", "9000"], "'--port' is of the page, and '--json' shows none"),
            (["watch", ".", "--json", "--no-browser"], "'--no-browser' is of the page"),
            (
                ["reproduce", "--list", "--seeds", "2"],
                "'--list' shows every recipe and runs none: leave '--seeds' out.",
            ),
            (["reproduce", "--list", "hbn"], "leave 'NAME' out."),
            (["reproduce", "--list", "--checkpoint-every", "2"], "leave '--checkpoint-every' out."),
            (["reproduce", "hbn/table1", "--markdown", "--json"], "two ways to print the same: keep one."),
            (["demo", "--rounds", "3"], "it is one of 'fedkeel run'; see 'fedkeel demo --help'."),
            (["resume", "/nowhere", "--seed", "3"], "it is one of 'fedkeel run'; see 'fedkeel resume --help'."),
            (["resume", "/nowhere"], "not a run directory"),
            (["show", "/nowhere"], "not a run directory"),
            (["list", "mehtods"], "did you mean 'methods'?"),
            (["data", "describ", "x"], "did you mean 'describe'?"),
            (["data"], "lacks COMMAND"),
            (["data", "describe", "folder", "--root", "/nowhere"], "/nowhere"),
        ],
    )
    def test_one_sentence_and_exit_code_2(
        self,
        words: list[str],
        named: str,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("fedkeel: ")
        assert err.count("\n") == 1
        assert named in err
        assert not (tmp_path / "runs").exists(), "nothing is written before all is checked"

    def test_a_place_that_cannot_be_written_is_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        assert main(["run", *TINY, "--out", str(tmp_path / "file" / "run")]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_bug_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("fedkeel.cli.list.run", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            main(["list", "methods"])


class TestLooking:
    def test_list_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        for kind in ("methods", "models", "data", "partitions", "transforms", "executors", "diagnostics"):
            assert main(["list", kind, "--json"]) == 0
            entries = json.loads(capsys.readouterr().out)
            assert all(entry["name"] and entry["summary"] for entry in entries)
            if kind == "methods":
                assert {e["name"]: e["options"] for e in entries}["fedprox"] == {"mu": 0.01}
                assert all(entry["paper"] for entry in entries)

    def test_list_has_a_line_for_each_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", "methods"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("fedprox ")]
        assert len(lines) == 1
        assert "Li et al. 2020" in lines[0]

    @pytest.mark.parametrize("width", [40, 80, 120])
    def test_on_a_terminal_a_name_has_one_line_that_fits(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        assert main(["list", "methods"]) == 0
        lines = stream.getvalue().splitlines()
        names = METHODS.names()
        assert [line.split()[0] for line in lines[: len(names)]] == names
        assert max(map(len, lines)) <= width

    def test_options_come_on_demand(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", "methods", "fedprox", "central"]) == 0
        text = capsys.readouterr().out
        assert "  mu=0.01" in text.splitlines()
        assert "Li et al. 2020" in text
        assert "options  none" in text
        assert main(["list", "methods", "fedprox", "--json"]) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["fedprox"]
        assert main(["list", "methods", "fedprxo"]) == 2
        assert "did you mean 'fedprox'?" in capsys.readouterr().err

    def test_without_a_kind_the_kinds_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list"]) == 0
        text = capsys.readouterr().out
        assert all(any(line.startswith(f"{kind} ") for line in text.splitlines()) for kind in KINDS)
        assert main(["list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == list(KINDS)

    def test_data_describe(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data", "describe", "digits-shift", "--unseen", "scan", "--json"]) == 0
        clients = {client["client"]: client for client in json.loads(capsys.readouterr().out)["clients"]}
        assert clients["scan"]["unseen"]
        assert clients["scan"]["train"] == 0
        assert clients["street"]["classes"] == 10
        assert main(["data", "describe", "digits-shift"]) == 0
        assert "street" in capsys.readouterr().out

    def test_data_describe_of_very_many_clients(self, capsys: pytest.CaptureFixture[str]) -> None:
        many = ["data", "describe", "digits-shift", "--partition", "dirichlet(clients=20000, samples=30)"]
        assert main(many) == 0
        text = capsys.readouterr().out
        assert "The first 100 of 100,000 clients." in " ".join(text.split())
        assert "scan-00099" in text
        assert "scan-00100" not in text
        assert main([*many, "--clients", "3", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["training_clients"] == 100_000
        assert [client["client"] for client in document["clients"]] == ["scan-00000", "scan-00001", "scan-00002"]
        assert main([*many, "--clients", "0"]) == 2
        assert "--clients is 0: give at least 1." in capsys.readouterr().err

    def test_data_show_writes_a_picture(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data", "show", "digits-shift", "-o", str(tmp_path / "sheet.png")]) == 0
        assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
        assert capsys.readouterr().out == f"{tmp_path / 'sheet.png'}\n"

    def test_show_one_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        finish(tmp_path / "a", Config(method="gn", result="mean-last-10"), {"scan": 0.25, "street": 0.75})
        assert main(["show", str(tmp_path / "a")]) == 0
        text = capsys.readouterr().out
        assert "gn on digits-shift" in text
        assert "75.0" in text
        assert "average 50.0 %" in text
        assert "mean of the last ten" in text
        assert "sent    10 B up, 10 B down, 1 B a round" in text
        assert main(["show", str(tmp_path / "a"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["summary"]["accuracy"] == 0.5

    def test_show_an_unfinished_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.toml").write_text(Config(rounds=9).to_toml())
        score = {"kind": "scores", "round": 3, "split": "test", "statistics": "global", "domains": {"scan": 0.5}}
        (tmp_path / "metrics.jsonl").write_text(json.dumps({**score, "average": 0.5}) + "\n")
        assert main(["show", str(tmp_path)]) == 0
        assert f"not finished: 4 of 9 rounds; continue with: fedkeel resume {tmp_path}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("accuracy", None), ("accuracy", "0.5"), ("accuracy", True), ("result", "first"), ("result", []),
            ("domains", ["scan"]), ("domains", {"scan": None}), ("unseen", "x"), ("unseen_domains", None),
            ("bytes_up", {}), ("seconds", "long"), ("executor", 7), ("samples_accuracy", None), ("rounds", "x"),
            ("questions", []),
        ],
    )  # fmt: skip
    @pytest.mark.slow
    def test_show_a_run_whose_summary_was_changed_by_hand(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: object
    ) -> None:
        finish(tmp_path / "a", Config(), {"scan": 0.25})
        path = tmp_path / "a" / "summary.json"
        whole = json.loads(path.read_text())
        path.write_text(json.dumps({**whole, name: value}))
        for words in ([], ["--json"], [str(tmp_path / "a")]):
            assert main(["show", str(tmp_path / "a"), *words]) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert f"its '{name}' is " in said
        path.write_text(json.dumps({key: kept for key, kept in whole.items() if key != name}))
        if name in whole:
            assert main(["show", str(tmp_path / "a")]) == 2
            assert f"its '{name}' is missing" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"accuracy": 0.5}'])
    def test_show_a_run_whose_summary_is_none(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        finish(tmp_path / "a", Config(), {"scan": 0.25})
        (tmp_path / "a" / "summary.json").write_text(text)
        assert main(["show", str(tmp_path / "a")]) == 2
        assert "summary.json'" in capsys.readouterr().err

    def test_show_several_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for method, accuracy in (("fedavg", 0.5), ("gn", 0.6)):
            for seed in range(2):
                finish(tmp_path / method / str(seed), Config(method=method, seed=seed), {"scan": accuracy + seed / 10})
        assert main(["show", str(tmp_path / "fedavg"), str(tmp_path / "gn")]) == 0
        text = capsys.readouterr().out
        assert "55.0 ±7.1" in text
        assert "65.0 ±7.1" in text
        assert "2 seeds" in text


class TestTraining:
    def test_run_prints_one_json_document_and_nothing_else(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["run", *TINY, "--rounds", "1", "--json", "--out", str(tmp_path / "run")]) == 0
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert document["finished"]
        assert len(document["summary"]["domains"]) == 5
        assert "round 1/1" in err
        assert main(["run", *TINY, "--out", str(tmp_path / "run")]) == 2
        assert "already holds a run" in capsys.readouterr().err
        assert main(["resume", str(tmp_path / "run"), "--workers", "x"]) == 2
        assert "'workers' is 'x', which is not a whole number" in capsys.readouterr().err
        assert main(["resume", str(tmp_path / "run")]) == 0
        assert "run' is finished: nothing is left to do." in capsys.readouterr().err

    @pytest.mark.slow
    def test_both_statistics_are_shown_and_a_model_without_batch_norm_is_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        both = ["run", *TINY, "--rounds", "1", "--evaluate-with", "both"]
        assert main([*both, "--out", str(tmp_path / "bn")]) == 0
        out, err = capsys.readouterr()
        scores = Run(tmp_path / "bn").scores(statistics="batch")
        assert f"{100 * scores[-1]['average']:.1f} % over domains with the batch's statistics" in out
        assert "no batch norm" not in err
        assert main([*both, "--method", "hbn", "--out", str(tmp_path / "hbn")]) == 0
        assert "no batch norm" not in capsys.readouterr().err
        assert main([*both, "--method", "gn", "--out", str(tmp_path / "gn")]) == 0
        assert "'evaluate_with' is 'both', but the model has no batch norm" in capsys.readouterr().err

    def test_compare_ends_with_1_when_a_run_is_missing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedkeel.experiments.jobs.execute", lambda *_: 1 / 0)
        words = ["compare", "fedavg", *TINY, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path), "--json"]
        assert main(words) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["missing"] == ["fedavg seed 0"]
        assert "fedavg seed 0 is missing from the table: ZeroDivisionError" in err


class TestFiles:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_a_file_is_a_command_whose_docstring_is_its_help(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        page = importlib.import_module(f"fedkeel.cli.{name}").__doc__
        assert page
        assert all(line in shown for line in page.splitlines())
        assert "examples:\n" in shown
        assert main(["--help"]) == 0
        assert any(line.split()[:1] == [name] for line in capsys.readouterr().out.splitlines())

    def test_a_command_is_added_by_adding_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "greet.py").write_text(GREET)
        monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
        assert main(["greet", "--name", "north"]) == 0
        assert capsys.readouterr().out == "hello north\n"
        assert main(["greet", "--nmae", "north"]) == 2
        assert "did you mean '--name'?" in capsys.readouterr().err


class TestTheProcess:
    def test_no_help_waits_for_torch(self) -> None:
        code = f"""
import sys
from fedkeel.cli import main
for name in [[], *([name] for name in {COMMANDS}), ["data", "describe"]]:
    assert main([*name, "--help"]) == 0
sys.exit(bool({{"torch", "numpy", "rich"}} & {{*sys.modules}}))
"""
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0

    @pytest.mark.slow
    def test_a_reader_that_leaves_is_no_error(self) -> None:
        command = f"{sys.executable} -m fedkeel list methods | head -n 1"
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert done.stderr == ""

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("fedkeel ")

    def test_alone_it_explains_itself(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 0
        assert "examples:" in capsys.readouterr().out


def test_runs_with_names_like_markup_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.report.samples import make_run

    names = ("[/b]", "\x1b[31mred", "=1", "<i>x</i>", "</script><script>alert(1)</script>")
    for method in ("fedavg", "fedbn"):
        make_run(tmp_path / method, method, rounds=2, domains=names)
    for given in ([str(tmp_path / "fedavg")], [str(tmp_path)]):
        assert main(["show", *given]) == 0
        printed = capsys.readouterr().out
        assert "[/b]" in printed
        assert "\x1b" not in printed
    assert main(["report", str(tmp_path), "--tables", str(tmp_path / "tables")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "alert(1)</script>" not in page
    assert "<i>x" not in page
    assert "<i>" not in (tmp_path / "tables" / "table.md").read_text()


def test_a_name_in_an_error_or_a_note_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    assert main(["show", f"{tmp_path}/\x1b[2Jgone\nfedkeel: all is well"]) == 2
    logging.getLogger("fedkeel").warning("The domain '%s' is odd.", "\x1b[31m\nx")
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert len(told.splitlines()) == 2
