"""Every code block of README, CONTRIBUTING and docs is run, or says above it why not. See `tests/blocks/pages.py`.

The quick tests read all of them: each command is understood, with its flags, names and options, each Python block
compiles and finds what it imports, each TOML and JSON is what its reader takes. The slow ones run them, page by page,
in a folder that has what the page speaks of, cut short as `tests/blocks/workshop.py` says.
"""

from __future__ import annotations

import ast
import csv
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedkeel
from fedkeel.config import from_dict, option_names
from fedkeel.deploy.policy import Policy
from fedkeel.experiments import recipes
from fedkeel.report.diagnostics import checked
from tests.blocks import commands, pages, workshop
from tests.blocks.pages import BLOCKS, BY_PAGE, ROOT, Block
from tests.processes import needs_ray

sys.path.insert(0, str(ROOT / "tools"))

from claims import read_claim

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OF_OTHERS = ("project", "superlink")  # tables of pyproject.toml and of Flower's configuration


def of(language: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language == language]


# -- every block says what it is -------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", BY_PAGE)
def test_every_block_has_a_language_and_every_remark_a_reason(page: str) -> None:
    for block in BY_PAGE[page]:
        assert block.language in pages.LANGUAGES, f"{block}: the fence says '{block.language}'"
        if block.kind == "not run:":
            assert len(block.said.split()) >= 3, f"{block}: why it is not run, in a few words"
            assert all((ROOT / test).exists() for test in re.findall(r"tests/[\w/.-]+\w", block.said)), str(block)
        if block.kind == "run by":
            assert Path(page).name in (ROOT / block.said).read_text(), f"{block}: {block.said} does not read the page"


def test_blocks_are_found_with_their_languages_and_remarks() -> None:
    text = "<!-- not run: for a reason -->\n\n```sh\nfedkeel\n```\n- a list\n  ~~~python\n  if x:\n      y\n  ~~~\n"
    found = pages.blocks_of(text, "page.md")
    assert [(b.line, b.language, b.text, b.kind, b.said) for b in found] == [
        (4, "sh", "fedkeel\n", "not run:", "for a reason"),
        (8, "python", "if x:\n    y\n", "", ""),
    ]


# -- quickly, without running ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", of("sh"))
def test_commands_are_understood(block: Block) -> None:
    for command in commands.commands_of(block):
        commands.understand(command)


@pytest.mark.parametrize(
    "command",
    [
        *("fedkeel run --method fedavgg", "fedkeel run --rouns 3", "fedkeel compare fedavg gn@learning_rat=1"),
        *(
            "fedkeel run --data 'folder(sizes=3)'",
            "fedkeel run --model resnt18",
            "fedkeel run --partition even(client=3)",
        ),
        *("fedkeel list methods nothing", "fedkeel show runs/a --diagnostic nothing", "fedkeel reproduce hbn/table99"),
        *("fedkeel data describe foldr", "make nothing", "pip install 'fedkeel[nothing]'"),
    ],
)
def test_a_misspelt_command_is_not(command: str) -> None:
    with pytest.raises((fedkeel.FedkeelError, AssertionError)):
        commands.understand(command)


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles_and_finds_what_it_imports(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedkeel":
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fedkeel":
            assert hasattr(fedkeel, node.attr), f"there is no fedkeel.{node.attr}"


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_what_its_reader_takes(block: Block, tmp_path: Path) -> None:
    table, file = tomllib.loads(block.text), tmp_path / "block.toml"
    file.write_text(block.text)
    if "claim" in table:
        assert [claim for entry in table["claim"] for claim in read_claim(entry)]
    elif "published" in table:
        assert recipes.parse("own/table", block.text).rows
    elif "policy.toml" in block.text:
        Policy.read(file)
    elif {*table} <= {*option_names()}:
        from_dict(table)
    else:
        assert {*table} <= {*OF_OTHERS}, "of what file is it?"


@pytest.mark.parametrize("block", of("json"))
def test_json_is_read_and_a_diagnostic_is_one_that_the_report_takes(block: Block) -> None:
    document = json.loads(block.text)
    for figure in document.get("figures", ()):
        assert checked(figure)["kind"] == figure["kind"]


@pytest.mark.parametrize("block", of("csv"))
def test_rows_of_a_table_are_as_wide_as_its_headings(block: Block) -> None:
    assert len({len(row) for row in csv.reader(block.text.splitlines())}) == 1


# -- page by page ----------------------------------------------------------------------------------------------------
def is_run(block: Block) -> bool:
    return block.language in ("sh", "python") and block.kind in ("", "first:")


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, blocks in BY_PAGE.items() if any(map(is_run, blocks))])
def test_the_page_works_as_typed(page: str, tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "docs/guides/ray.md":
        needs_ray()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / ".cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    reader = ModuleType("reader")  # what is typed on one page is known further down on it
    monkeypatch.setitem(sys.modules, reader.__name__, reader)
    with workshop.cut_short():
        for block in BY_PAGE[page]:
            if block.kind == "first:":
                exec(compile(block.said, f"{page}: first", "exec"), vars(reader))
            if block.language == "toml" and block.text.startswith("# ") and ".toml" in block.text.splitlines()[0]:
                Path(block.text.split()[1].rstrip(":")).write_text(block.text)  # "# fed.toml: ..."
            if is_run(block):
                run(block, reader, shelf)


def run(block: Block, reader: ModuleType, shelf: Path) -> None:
    try:
        if block.language == "python":
            workshop.provide(block.text, shelf)
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec", dont_inherit=True), vars(reader))
            return
        for command in commands.commands_of(block):
            typed = command.replace("runs/...", "runs/mine")  # a run of the reader's
            workshop.provide(typed, shelf)
            commands.run(typed)
    except Exception as error:
        if isinstance(error, fedkeel.FedkeelError) and commands.LACKING.search(str(error)):
            return
        raise AssertionError(f"{block}: {error}") from error


@pytest.mark.slow
def test_a_page_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, text in (("sh", "fedkeel run --model alexnet"), ("sh", "ls nowhere"), ("python", "1 / 0")):
        with workshop.cut_short(), pytest.raises(AssertionError, match=r"page\.md:3"):
            run(Block("page.md", 3, language, text), ModuleType("reader"), tmp_path)
