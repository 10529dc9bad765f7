"""Make a model for one site of a finished run: its normalisation gets the statistics of the site's images,
which need no labels, mixed with the federation's. It says first how far the site's images are from the
federation's and what is expected of it, then writes FILE, and FILE.json with a record of what was done.

examples:
  fedkeel calibrate runs/hospitals --images scans/ --look
  fedkeel calibrate runs/hospitals --images scans/ --out north.safetensors
  fedkeel predict runs/hospitals new/ --calibrated north.safetensors
  fedkeel calibrate runs/hospitals --images scans/ --out north.onnx --with-transform
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedkeel.cli.terminal.output import show
from fedkeel.cli.terminal.parsing import Arguments, Parser
from fedkeel.config import Config
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError

HELP = "adapt a trained model to a site using unlabelled images"
USAGE = "DIR --images DIR [options]"
PRIOR = Config.site_prior


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FedkeelError(f"'prior' is '{text}': give a number of images, such as {PRIOR:g}.") from None


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="a run directory")
    add("--images", nargs="+", required=True, metavar="DIR", help="image files of the site, or folders of them")
    about = f"images that the federation's statistics are worth (default: {PRIOR:g})"
    add("--prior", metavar="X", type=number, default=PRIOR, help=about)
    kinds = "the file to write: .safetensors, .onnx or .pt2 (default: RUN-site.safetensors, in this folder)"
    add("--out", metavar="FILE", help=kinds)
    add("--look", action="store_true", help="only say how far the site is and what would change; write nothing")
    add(
        "--always", action="store_true", help="take all that differs for the look of the images, whatever their classes"
    )
    add("--with-transform", action="store_true", help="for what runs without Fedkeel: take images as stored, uint8")
    add("--client", metavar="NAME", help="whose model, where clients keep layers of their own")
    parser.add_shared("--json", "--import")


def run(arguments: Arguments) -> int:
    from fedkeel.runs.calibrated import calibrate, check_file

    for given, flag in ((arguments.out, "--out"), (arguments.with_transform, "--with-transform")):
        if arguments.look and given:
            raise FedkeelError(f"'{flag}' is of the file that is written, and '--look' writes none: keep one.")
    name, transform = Path(arguments.directory).resolve().name, arguments.with_transform
    file = None if arguments.look else Path(arguments.out or f"{name}-site.safetensors")
    if file is not None:
        check_file(file, with_transform=transform)
    options = {"always": arguments.always, "client": arguments.client}
    site = calibrate(arguments.directory, arguments.images, arguments.prior, **options, tolerate=True)
    if not arguments.json:
        show(site.sentences())
    if file is not None:
        site.save(file, with_transform=transform)
    written = None if file is None else str(file)
    show([written] if written else [], {**site.to_dict(), "file": written}, as_json=arguments.json)
    for problem in site.unreadable.values():
        print(f"fedkeel: {visible(problem)}", file=sys.stderr)
    return 1 if site.unreadable else 0
