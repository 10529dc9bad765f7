"""The README's table of the five papers, rendered from the ledger.

python tools/papers.py            # writes it
python tools/papers.py --check    # says whether it is what the ledger says
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedkeel.experiments.ledger import Ledger
from fedkeel.experiments.results_page import all_blocks, headlines

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- rendered by tools/papers.py -->\n", "<!-- to here -->\n"


def rendered(text: str, ledger: Ledger) -> str:
    """The README with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    blocks, _ = all_blocks(ledger)
    return before + BEGIN + "\n" + "\n".join(headlines(blocks)) + "\n\n" + END + after


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = rendered(text, Ledger(ROOT / "results"))
    if "--check" in sys.argv[1:]:
        return int(new != text)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
