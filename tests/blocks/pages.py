"""The fenced blocks of README, CONTRIBUTING and docs, each with its language and the remark above it.

A remark is an HTML comment right above a fence, which no reader of the page sees:

    <!-- not run: needs PACS, which everyone has to get -->    the reason, in three words or more
    <!-- run by tests/data/test_contributing.py -->            that test takes the block from the page itself
    <!-- first: x, y = torch.rand(9, 4), torch.arange(9) -->   Python that gives the block what its page speaks of
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("sh", "python", "toml", "json", "csv", "text")  # text is output, a tree of files, a drawing: not code

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[^`]*)$")
REMARK = re.compile(r"<!--\s*(not run:|run by|first:)(.*)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind` of its remark: "not run:", "run by", "first:", or nothing."""

    page: str
    line: int  # of its first line of code, counted from 1
    language: str
    text: str
    kind: str = ""
    said: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks in the order of the page."""
    lines, found, number = text.splitlines(), [], 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        first = number
        while number < len(lines) and lines[number].strip() != fence["ticks"]:
            number += 1
        assert number < len(lines), f"{page}:{first}: the fence has no end"
        body = textwrap.dedent("\n".join(lines[first:number])) + "\n"
        kind, said = remark_above(lines[: first - 1])
        found.append(Block(page, first + 1, fence["language"].strip(), body, kind, said))
        number += 1
    return found


def remark_above(lines: list[str]) -> tuple[str, str]:
    """The remark that ends the text before a fence: its kind and what it says."""
    text = "\n".join(lines).rstrip()
    if not text.endswith("-->"):
        return "", ""
    remark = REMARK.fullmatch(text[text.rindex("<!--") :])
    return (remark[1], textwrap.dedent(remark[2]).strip()) if remark else ("", "")


BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"), name_of(page))]
BY_PAGE: dict[str, list[Block]] = {
    page: [block for block in BLOCKS if block.page == page] for page in {block.page: None for block in BLOCKS}
}

if __name__ == "__main__":
    left = [block for block in BLOCKS if block.kind == "not run:"]
    for block in left:
        print(f"{block} ({block.language}): {block.said}")
    print(f"{len(BLOCKS)} blocks on {len(BY_PAGE)} pages, {len(left)} of them not run.")
