"""A trained model as a file that runs without Fedkeel: ONNX or torch.export's pt2.

What is written maps a batch of images to logits, of any batch size. Layers are as they are at test time: FedWon's
standardised convolutions are folded into plain ones, batch norm (HBN's too) uses the global statistics. Beside FILE
lies FILE.json with the classes and the shape of the input.
"""

import importlib
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.data.federation import Federation
from fedkeel.data.transforms import Unknown, transforms_text
from fedkeel.errors import FedkeelError, first_line, nearest
from fedkeel.files import plain, write_atomically
from fedkeel.nn.scaled_ws_conv import fold
from fedkeel.options import as_path
from fedkeel.runs.run import Run
from fedkeel.runs.site_model import CARD
from fedkeel.runs.trained import Deployed, as_tested

FORMATS = {"onnx": ".onnx", "pt2": ".pt2"}
INPUT, OUTPUT = "images", "logits"


def export(
    run: Run | str | Path,
    file: str | Path,
    format: str | None = None,
    *,
    with_transform: bool = False,
    client: str | None = None,
) -> Path:
    """Write the model of a finished run to `file`; returns its path.

    Args:
        run: a run, or its directory.
        format: "onnx" or "pt2"; by default as the file's name ends.
        with_transform: take images as the data set stores them (uint8) and normalise them as in testing.
        client: whose model, for a method that keeps layers on its clients.
    """
    run, path = run if isinstance(run, Run) else Run(run), as_path(file, "file")
    format = target(path, format_of(path, format))
    network, federation = run.network(client)
    if with_transform and isinstance(federation.test_transform, Unknown):
        raise FedkeelError(
            f"How images become what the network of '{run.directory}' sees is not known here, since it was done at its "
            "sites or by a transform given in Python: leave --with-transform out."
        )
    transform, image = federation.test_transform, federation.images[:1]
    example = image if with_transform else as_tested(transform, image)
    about = describe(format, federation.classes, example) | origin(run, federation, client, done_inside=with_transform)
    return write(path, format, Deployed(fold(network), transform if with_transform else None), example, about)


def target(path: Path, format: str) -> str:
    """The format, if a file can be written in it here; refused before anything else is done."""
    if not path.absolute().parent.is_dir():
        raise FedkeelError(f"'{path}' cannot be written: its folder does not exist.")
    if format == "onnx":
        require_onnx()
    return format


def write(path: Path, format: str, model: nn.Module, example: Tensor, about: Mapping[str, Any]) -> Path:
    """A model that gives logits, an image that it takes, (1, ...), and what is to be known of it."""
    # The layout that training liked is none of a file's business.
    model.eval().requires_grad_(False).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    # Two images: with a batch of one, the size of the batch would be a constant.
    images = example.expand(2, *example.shape[1:]).contiguous()
    card = json.dumps(plain(dict(about)), indent=1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        data = WRITERS[format](model, images, card)
    write_atomically(path, data)
    write_atomically(path.with_name(f"{path.name}.json"), card.encode() + b"\n")
    return path


def format_of(path: Path, given: str | None) -> str:
    """The format that was asked for, or the one that a file of this name has."""
    if given is None:
        by_ending = {ending: name for name, ending in FORMATS.items()}
        if path.suffix not in by_ending:
            raise FedkeelError(
                f"'{path}' does not say which format it is to have: give --format {', '.join(FORMATS)}, "
                f"or a name that ends in {', '.join(by_ending)}."
            )
        return by_ending[path.suffix]
    if given not in FORMATS:
        raise FedkeelError(f"The format is '{given}': {nearest(given, FORMATS)}")
    return given


def require_onnx() -> None:
    try:
        for package in ("onnx", "onnxscript"):
            importlib.import_module(package)
    except ImportError as error:
        raise FedkeelError(
            f"The format 'onnx' needs {error.name}, which is not installed: 'pip install fedkeel[export]', or take pt2."
        ) from None


def describe(format: str, classes: Sequence[str], example: Tensor) -> dict[str, Any]:
    return {
        "format": format,
        "classes": list(classes),
        "input": {
            "name": INPUT,
            "shape": ["batch", *example.shape[1:]],
            "dtype": str(example.dtype).removeprefix("torch."),
            "range": [0, 255] if example.dtype == torch.uint8 else None,
        },
        "preprocessing": None,
        "output": {"name": OUTPUT, "shape": ["batch", len(classes)], "dtype": "float32"},
    }


def origin(run: Run, federation: Federation, client: str | None, *, done_inside: bool) -> dict[str, Any]:
    """What a run says of its model; `done_inside`: the transform is a part of it."""
    return {
        "preprocessing": preprocessing(federation, done_inside=done_inside),
        **{option: getattr(run.config, option) for option in ("method", "model", "data")},
        "client": client,
        "accuracy": run.accuracy if client is None else run.accuracy_of(client),
    }


def preprocessing(federation: Federation, *, done_inside: bool) -> dict[str, Any] | None:
    """How an image becomes the input; None where it is not known here."""
    transform = transforms_text(federation.test_transform)
    if isinstance(federation.test_transform, Unknown) or transform is None:
        return None
    mode, resize = None, None
    if not federation.images.is_floating_point():
        channels, height, width = federation.image_shape
        mode = "RGB" if channels == 3 else "L" if channels == 1 else None
        resize = {"height": height, "width": width, "interpolation": "bilinear"}
    return {
        "mode": mode,
        "resize": resize,
        **({"bits": federation.bits} if federation.bits else {}),  # of 16-bit grey images: the upper eight
        "transform": transform,  # of uint8 images, or of floats as they are, see docs/data.md
        "transform_done_inside": done_inside,
    }


# -- the formats -------------------------------------------------------------------------------------------------------
def to_pt2(model: nn.Module, example: Tensor, card: str) -> bytes:
    program = exported(model, example)
    file = BytesIO()
    torch.export.save(program, file, extra_files={CARD: card})
    return file.getvalue()


def to_onnx(model: nn.Module, example: Tensor, card: str) -> bytes:
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):  # the exporter tells of its progress
            program = torch.onnx.export(
                exported(model, example),
                (example,),
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: "batch"},),  # for its name in the file
                dynamo=True,
            )
    finally:
        log.setLevel(level)
    assert program is not None
    proto = program.model_proto
    proto.metadata_props.add(key=CARD, value=card)
    data: bytes = proto.SerializeToString()
    return data


def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    except Exception as error:  # the exporter's own, of many kinds
        raise FedkeelError(
            f"torch.export cannot take this model apart ({first_line(error)}): use Run.model(), the network in Python."
        ) from error


WRITERS = {"onnx": to_onnx, "pt2": to_pt2}
