"""A figure that a notebook shows and that can be saved; Vega for a page that asks nothing of any network."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedkeel.core.naming import visible
from fedkeel.drawing.theme import config
from fedkeel.drawing.vega import Spec, chart
from fedkeel.errors import FedkeelError, first_line, unknown
from fedkeel.files import write_atomically
from fedkeel.options import as_path

VEGA = "vega.js.gz"  # made by .ci/vega
VERSION = "6.4"  # of Vega-Lite, in that file and for those that vl-convert makes
FORMATS = ("svg", "png", "pdf")
DOTS = 300  # an inch, of a PNG
WIDTH = 520  # of a figure on its own, in pixels of 1/96 inch: the text of a page with one column


def packed_vega() -> bytes:
    """Vega, Vega-Lite and Vega-Embed as one script, compressed."""
    return resources.files(__package__).joinpath(VEGA).read_bytes()


def require_converter() -> None:
    if importlib.util.find_spec("vl_convert") is None:
        raise FedkeelError("Figures need vl-convert-python, which is not installed: pip install 'fedkeel[report]'.")


def alone(spec: Spec) -> Spec:
    """A figure of a page with all that it needs to be drawn by itself."""
    width = min(WIDTH, spec.get("usermeta", {}).get("widest", WIDTH))
    return {**spec, "width": width, "config": config()}


def as_file(spec: Spec, format: str) -> bytes:
    """A figure as SVG or PDF, in which text stays text, or as PNG."""
    require_converter()
    import vl_convert

    drawn = printable(alone(spec))
    try:
        if format == "png":
            return bytes(vl_convert.vegalite_to_png(drawn, VERSION, scale=1, ppi=DOTS))
        if format == "pdf":
            return bytes(vl_convert.vegalite_to_pdf(drawn, VERSION))
        return str(vl_convert.vegalite_to_svg(drawn, VERSION)).encode()
    except ValueError as error:
        raise FedkeelError(f"A figure ({spec['description']}) cannot be drawn: {first_line(error)}.") from error


def printable(value: Any) -> Any:
    """Without letters that a file must not have, which names may."""
    if isinstance(value, dict):
        return {key: printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [printable(part) for part in value]
    return visible(value) if isinstance(value, str) else value


class Drawing:
    """A figure to be looked at: a notebook shows it, `save` writes it, and `spec` is all of it as Vega-Lite.

    `figure` is a plain table of the kind lines, bars, matrix or points, as `Run.plot` and the diagnostics make it.

    >>> line = {"name": "fedavg", "x": [1, 2], "y": [3.0, 1.0]}
    >>> Drawing({"kind": "lines", "title": "loss", "x_label": "round", "series": [line]})
    Drawing('loss; fedavg')
    """

    def __init__(self, figure: Mapping[str, Any]) -> None:
        self.figure, self.spec = dict(figure), alone(chart(figure))

    def __repr__(self) -> str:
        return f"Drawing({visible(self.spec['description'])!r})"

    def save(self, path: str | Path) -> Path:
        """As its ending says: .svg, .png or .pdf for a paper, .json for Vega-Lite."""
        place, known = as_path(path, "path"), (*FORMATS, "json")
        format = place.suffix.removeprefix(".").lower()
        if format not in known:
            raise FedkeelError(unknown("format of a figure", format, known))
        data = json.dumps(self.spec, indent=1).encode() if format == "json" else as_file(self.spec, format)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, data)
        except OSError as error:
            raise FedkeelError(f"'{place}' cannot be written: {error.strerror or error}; choose another.") from error
        return place

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """For a notebook: Vega-Lite, and a picture where that is not known."""
        bundle: dict[str, Any] = {"text/plain": repr(self), "application/vnd.vegalite.v5+json": self.spec}
        if importlib.util.find_spec("vl_convert") is not None:
            bundle["image/svg+xml"] = as_file(self.spec, "svg").decode()
        return bundle
