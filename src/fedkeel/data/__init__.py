"""Data: federations, the data sets they are read from, and the ways to cut them into clients."""

from fedkeel.data import readers  # noqa: F401  (every file there registers itself)
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Client, Federation, Transform
from fedkeel.data.load import load, load_spec
from fedkeel.data.own import federation
from fedkeel.data.partition import PARTITIONS, Partition
from fedkeel.data.population import Split
from fedkeel.data.reader import DATASETS, Reader, TreeReader, published
from fedkeel.data.show import contact_sheet, describe
from fedkeel.data.transforms import TRANSFORMS, Pipeline, parse_transforms

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "TRANSFORMS",
    "Client",
    "Dataset",
    "Federation",
    "Partition",
    "Pipeline",
    "Reader",
    "Split",
    "Transform",
    "TreeReader",
    "contact_sheet",
    "describe",
    "federation",
    "load",
    "load_spec",
    "parse_transforms",
    "published",
]
