"""How good the model of a run is on new labelled images: accuracy and the other measures by site and by class,
each with the 95 % interval that the number of images leaves.

DATA is a folder, DIR/CLASS/*.png or DIR/SITE/CLASS/*.png; a table (CSV) with the columns path, label and site;
an .npz file with x_SITE and y_SITE; or the name of a data set, which is tested on its test images.

examples:
  fedkeel evaluate runs/hospitals labelled/
  fedkeel evaluate runs/hospitals march.csv --json
  fedkeel evaluate runs/hospitals labelled/ --calibrated north.safetensors
  fedkeel evaluate runs/digits-shift-fedavg-seed0 'digits-shift(validation=0)'
"""

from __future__ import annotations

from fedkeel.cli.terminal.output import Table, show
from fedkeel.cli.terminal.parsing import Arguments, Parser

HELP = "how good the model of a run is on new labelled images"
USAGE = "DIR DATA [options]"


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="a run directory")
    add("data", metavar="DATA", help="labelled images: a folder, a table, an .npz file, or the name of a data set")
    add("--client", metavar="NAME", help="whose model, where clients keep layers of their own")
    add("--calibrated", metavar="FILE", help="the model for a site, a .safetensors that 'fedkeel calibrate' wrote")
    parser.add_shared("--json", "--import")


def run(arguments: Arguments) -> int:
    from fedkeel.report.measures import class_table, confusion_table, site_table
    from fedkeel.runs.run import load

    trained = load(arguments.directory, client=arguments.client, calibrated=arguments.calibrated)
    measures = trained.evaluate(arguments.data)
    captions = (
        "By site; in brackets the 95 % interval that the number of samples leaves.",
        "By class, over all sites.",
        "Confusion matrix, over all sites.",
    )
    tables = [site_table(measures), class_table(measures), confusion_table(measures)]
    lines = [Table(headings, rows, said) for (headings, rows, _), said in zip(tables, captions, strict=True)]
    notes = [f"note    {sentence}" for sentence in measures.notes()]
    show([*lines, *notes], measures.to_dict(), as_json=arguments.json)
    return 0
