"""What the trained model of a run says of images: class and probability of each, as a table, or all
probabilities as CSV. Neither the data of the run nor the machine it was made on is needed.

examples:
  fedkeel predict runs/hospitals new/ --out predictions.csv
  fedkeel predict runs/digits-shift-fedbn-seed0 a.png b.png --client scan
"""

from __future__ import annotations

import sys

from fedkeel.cli.terminal.output import Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.core.naming import visible

HELP = "classify images with the model of a run"
USAGE = "DIR IMAGE... [options]"
MOST_ROWS = 100  # of a table that a person reads


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="a run directory")
    add("images", nargs="+", metavar="IMAGE", help="image files, or folders that have some in them")
    add("--out", metavar="FILE.csv", help="write every image with the probability of each class")
    add("--client", metavar="NAME", help="whose model, where clients keep layers of their own")
    add("--calibrated", metavar="FILE", help="the model for a site, a .safetensors that 'fedkeel calibrate' wrote")
    parser.add_shared("--json", "--import")


def run(arguments: Arguments) -> int:
    from fedkeel.runs.run import load

    trained = load(arguments.directory, client=arguments.client, calibrated=arguments.calibrated)
    found = trained.predict(arguments.images, tolerate=True)
    rows = [(row[found.unit], row["class"], f"{row['probability']:.3f}") for row in found.rows()]
    if arguments.out:
        print(found.to_csv(arguments.out))
    else:
        more = [f"and {len(rows) - MOST_ROWS} more: --out FILE.csv has all of them."] if len(rows) > MOST_ROWS else []
        show(
            [Table([found.unit, "class", "probability"], rows[:MOST_ROWS]), *more],
            list(found.rows()),
            as_json=arguments.json,
        )
    for problem in found.unreadable.values():
        print(f"fedkeel: {visible(problem)}", file=sys.stderr)
    return 1 if found.unreadable else 0
