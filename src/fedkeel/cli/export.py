"""Write the model of a finished run as a file that runs without Fedkeel, and FILE.json with its
classes and the shape of its input. Any batch size; the outputs are logits.

examples:
  fedkeel export runs/digits-shift-fedavg-seed0 --out digits.onnx
  fedkeel export runs/digits-shift-hbn-seed0 --out digits.pt2 --with-transform
  fedkeel export runs/digits-shift-fedbn-seed0 --client mnist --out mnist.pt2
"""

from fedkeel.cli.terminal.parsing import Arguments, Parser

HELP = "write a trained model as ONNX or pt2"
USAGE = "DIR --out FILE [options]"
FORMATS = ("onnx", "pt2")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="a run directory")
    add("--out", required=True, metavar="FILE", help="the file to write")
    add("--format", choices=FORMATS, metavar="|".join(FORMATS), help="(default: as the file's name ends)")
    add("--with-transform", action="store_true", help="take images as stored, uint8, and normalise them as in testing")
    parser.add_shared("--import")
    add("--client", metavar="NAME", help="whose model, where clients keep layers of their own")


def run(arguments: Arguments) -> int:
    from fedkeel.runs.export import export

    transform, client = arguments.with_transform, arguments.client
    print(export(arguments.directory, arguments.out, arguments.format, with_transform=transform, client=client))
    return 0
