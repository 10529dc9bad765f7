"""The README's table of the five papers, rendered from the ledger.

python tools/papers.py            # writes it
python tools/papers.py --check    # says whether it is what the ledger says
"""

from __future__ import annotations

import sys
from pathlib import Path

from ledger import Ledger
from results import claim_lines, tables_of

from fedkeel.experiments.paper_table import markdown_table

ROOT = Path(__file__).parents[1]
HEADINGS = ["paper", "its claim", "published", "here, at the paper's size", "here, on two cores"]
BEGIN, END = "<!-- rendered by tools/papers.py -->\n", "<!-- to here -->\n"


def rendered(text: str, ledger: Ledger) -> str:
    """The README with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = markdown_table(HEADINGS, claim_lines(tables_of(ledger)[0], headlines=True))
    return before + BEGIN + "\n" + "\n".join(table) + "\n\n" + END + after


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = rendered(text, Ledger())
    if "--check" in sys.argv[1:]:
        return int(new != text)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
