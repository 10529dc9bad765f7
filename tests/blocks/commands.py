"""The lines of a shell block: split as a shell would, understood without being run, and run."""

from __future__ import annotations

import functools
import glob
import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import torch

from fedkeel import analysis, methods, spec
from fedkeel.cli import build_parser, main
from fedkeel.cli.list import registry
from fedkeel.cli.terminal.parsing import Arguments, Parser, given_options
from fedkeel.config import Config, from_dict
from fedkeel.core.composition import Composition
from fedkeel.data import DATASETS
from fedkeel.data.load import Cut
from fedkeel.engine import checks
from fedkeel.engine.executors.executor import choose_executor
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import load
from fedkeel.experiments.rows import SET_BY_COMPARISON, read_methods
from fedkeel.models import MODELS, timm_models
from fedkeel.trust import privacy
from tests.blocks.pages import ROOT, Block

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


DONE: set[str] = set()  # commands that a page has run
FOREVER = {"server", "join", "watch"}
LACKING = re.compile(r"\bpip install\b")  # what a sentence says that names a missing extra


def commands_of(block: Block) -> list[str]:
    """The lines of a block without comments, those that end in a backslash joined with the next."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


def parts_of(command: str) -> tuple[dict[str, str], list[str], Path | None]:
    """What is set before it (`FEDKEEL_DATA=./data fedkeel ...`), its words, and the file that its output goes to."""
    words = shlex.split(command, comments=True)
    out = Path(words[-1]) if words[-2:-1] == [">"] else None
    words = words[:-2] if out else words
    count = next(number for number, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:], out


# -- without running -------------------------------------------------------------------------------------------------
def understand(command: str) -> None:
    """Refuse what a reader could not type: an unknown flag, name or option, a package or a target that is not there.
    What else a shell has (mkdir, ls, ssh-keygen, ...) is left to the running of it."""
    _, words, _ = parts_of(command)
    if words[0] == "fedkeel":
        understand_fedkeel(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= {*targets}, "the Makefile has no such target"
    elif "pip" in words:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [name for group in re.findall(r"\[([\w,-]+)\]", command) for name in group.split(",")]
        assert {*named} <= {*extras}, "pyproject.toml has no such extra"


def understand_fedkeel(words: list[str]) -> None:
    try:
        arguments = parser().parse_args(words)
    except SystemExit:  # --help and the like
        return
    except FedkeelError as error:
        if not LACKING.search(str(error)):
            raise
        return
    if getattr(arguments, "config", None) or getattr(arguments, "imports", None):
        return  # what a file adds is known when it is there
    command = arguments.run.__module__.rpartition(".")[2] if hasattr(arguments, "run") else ""
    if command in ("run", "compare", "tune"):
        for config in configurations(command, arguments):
            understand_options(config)
    elif command == "list":
        for name in arguments.names:
            registry(arguments.list).entry(name)
    elif command == "data" and isinstance(getattr(arguments, "data", None), str):
        understand_data(arguments.data)
    elif command == "show" and arguments.diagnostic:
        analysis.build(arguments.diagnostic)
    elif command == "reproduce" and arguments.recipe:
        load(arguments.recipe)


@functools.cache
def parser() -> Parser:
    return build_parser()


def configurations(command: str, arguments: Arguments) -> list[Config]:
    options = given_options(arguments)
    if command == "run":
        return [from_dict(options)]
    return [*read_methods(arguments.methods, {k: v for k, v in options.items() if k not in SET_BY_COMPARISON}).values()]


def understand_options(config: Config) -> None:
    """What `prepare` refuses before it reads an image, and the names of the data and the network."""
    device = torch.device("cpu")
    composed = Composition.of(methods.build(config.method))
    defence = privacy.choose_rules(config).aggregator.defence
    choose_executor(config.replace(device="cpu"), device)
    checks.check_options(config, composed, defence)
    understand_data(config.data)
    Cut(partition=config.partition)
    model = spec.parse(config.model)
    if model.name in MODELS:
        MODELS.entry(model.name).check_options("model", model.options)
    else:
        assert model.name.startswith(timm_models.PREFIX), f"there is no model '{model.name}'"
    if config.record:
        analysis.requested(config)


def understand_data(text: str) -> None:
    data = spec.parse(text)
    own = {name: value for name, value in data.options.items() if name not in Cut.__dataclass_fields__}
    DATASETS.entry(data.name).check_options("data set", own)


# -- running ---------------------------------------------------------------------------------------------------------
def run(command: str) -> None:
    """Run a line in the present folder; whatever ends with another code than 0 is an error."""
    environment, words, out = parts_of(command)
    if words[0] == "make" or "pip" in words:
        return  # `understand` has looked at it
    if words[0] != "fedkeel":
        subprocess.run(["bash", "-ec", command], check=True, timeout=60, stdout=subprocess.DEVNULL)
        return
    assert "--json" in words or not {*words[1:2]} & FOREVER, f"'{command}' waits until it is stopped: mark the block"
    words = [found for word in words for found in sorted(glob.glob(word)) or [word]]
    given = shortened(words[1:])
    if given == ["demo", "--quick"] and " ".join(given) in DONE:
        return  # several pages begin with it, and it depends on nothing of theirs; `provide` has what comes of it
    said, told = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, environment), redirect_stdout(said), redirect_stderr(told):
        code = main(given)
    assert code == 0 or LACKING.search(told.getvalue()), f"'{command}' ended with {code}: {told.getvalue()[-500:]}"
    DONE.add(" ".join(given))
    if out:
        out.write_text(said.getvalue())


def shortened(words: list[str]) -> list[str]:
    """Commands that take their time without any option to cut: the short form that each of them has."""
    short = {"demo": ["--quick"]}
    return [*words, *(flag for flag in short.get(words[0], ()) if flag not in words)] if words else words
