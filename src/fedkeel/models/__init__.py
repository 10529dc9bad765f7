"""The networks of the papers, networks of timm, and `wrap` for any other. Every model returns `Output`."""

from fedkeel.core.types import Classifier, Output
from fedkeel.models.catalogue import MODELS, build, build_spec, names, network
from fedkeel.models.checkpoint import load_weights
from fedkeel.models.encoder import Encoder, ImageSize, Projector
from fedkeel.models.wrapped import Wrapped, refuse_lazy, wrap
from fedkeel.registry import discover

discover(__name__)

__all__ = [
    "MODELS",
    "Classifier",
    "Encoder",
    "ImageSize",
    "Output",
    "Projector",
    "Wrapped",
    "build",
    "build_spec",
    "load_weights",
    "names",
    "network",
    "refuse_lazy",
    "wrap",
]
