"""The command that hands a trained model on: export."""

from __future__ import annotations

import argparse
from typing import Any

from fedkeel.cli.parsing import examples

FORMATS = ("onnx", "torchscript", "pt2")


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        usage="%(prog)s DIR --out FILE [options]",
        help="write a trained model as ONNX, TorchScript or pt2",
        description="Write the model of a finished run as a file that runs without Fedkeel, and FILE.json with its\n"
        "classes and the shape of its input. Any batch size; the outputs are logits.",
        epilog=examples(
            [
                "fedkeel export runs/digits-shift-fedavg-seed0 --out digits.onnx",
                "fedkeel export runs/digits-shift-hbn-seed0 --out digits.pt2 --with-transform",
                "fedkeel export runs/digits-shift-fedbn-seed0 --client mnist --format torchscript --out mnist.pt",
            ]
        ),
    )
    parser.add_argument("directory", metavar="DIR", help="a run directory")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--format", choices=FORMATS, metavar="|".join(FORMATS), help="(default: as the file's name ends)"
    )
    parser.add_argument(
        "--with-transform", action="store_true", help="take images as stored, uint8, and normalise them as in testing"
    )
    parser.add_argument("--client", metavar="NAME", help="whose model, where clients keep layers of their own")
    parser.set_defaults(act=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    from fedkeel.runs.export import export

    path = export(
        arguments.directory,
        arguments.out,
        arguments.format,
        with_transform=arguments.with_transform,
        client=arguments.client,
    )
    print(path)
    return 0
