"""Data: federations, the data sets they are read from, and the ways to cut them into clients."""

# Importing these modules registers their data sets and transforms.
from fedkeel.data import colour, readers  # noqa: F401
from fedkeel.data.federation import Client, Federation, Transform
from fedkeel.data.formats import packed  # noqa: F401
from fedkeel.data.load import load, load_spec
from fedkeel.data.partition import PARTITIONS, Partition
from fedkeel.data.population import Population
from fedkeel.data.show import ClientRow, contact_sheet, describe
from fedkeel.data.source import DATASETS, Source, Split
from fedkeel.data.transforms import TRANSFORMS, Pipeline, parse_transforms

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "TRANSFORMS",
    "Client",
    "ClientRow",
    "Federation",
    "Partition",
    "Pipeline",
    "Population",
    "Source",
    "Split",
    "Transform",
    "contact_sheet",
    "describe",
    "load",
    "load_spec",
    "parse_transforms",
]
