"""The data of one site of a real federation, read as the server's configuration says: images in `folder/<class>/*.png`,
or a table, CSV or parquet, of images or of numbers.

The same rules as for `folder` and `table`, of which a site is one domain: a federation over a network and a run over
all of them on one machine train on the same samples in the same order.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedkeel import spec
from fedkeel.config import Config
from fedkeel.data.federation import Federation
from fedkeel.data.load import Cut
from fedkeel.data.reader import DATASETS, Reader
from fedkeel.data.readers.folder import Folder
from fedkeel.data.readers.table import Table
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError
from fedkeel.spec import names

OPTIONS = ("size", "validation", "test", "split_seed", "label", "path", "part")
OWN = ("group", "tolerate", "bits")  # which each site knows best, and gives itself
CUTTING = ("classes", "unseen", "unseen_split", "tests", "seed", "partition", "train_transform", "test_transform")


def site_reader(path: Path, name: str, **options: Any) -> Reader:
    """Of what lies at `path`: a table if it is a file, else folders of images."""
    return Table(file=path, called=name, **options) if path.is_file() else Folder(root=path, called=name, **options)


def check_reading(config: Config) -> dict[str, Any]:
    """The options of the data set, if sites can read their data so."""
    parsed = spec.parse(config.data)
    if parsed.name not in ("folder", "table"):
        raise DataError(
            f"The data set is '{config.data}', but sites have folders of images or tables: give 'folder(size=64)' or "
            "'table(label=diagnosis)'."
        )
    partition = parsed.options.get("partition", config.partition)
    if partition != "domains":
        raise DataError(f"The partition is '{partition}', but over a network each site is one client: leave it out.")
    for option in parsed.options:
        if option in OWN:
            raise DataError(
                f"The {option} in '{config.data}' is for each site to say: leave it out, and give --{option} to "
                "'fedkeel join'."
            )
        if option not in (*OPTIONS, *CUTTING):
            raise DataError(f"A site does not know the option '{option}' of '{config.data}': leave it out.")
    return dict(parsed.options)


def reading(config: Config) -> dict[str, Any]:
    """Of the options those of the reader, held against their types."""
    parsed = spec.parse(config.data)
    own = {key: value for key, value in parsed.options.items() if key in OPTIONS}
    return DATASETS.entry(parsed.name).check_options("data set", own)


def image_shape(config: Config) -> tuple[int, int, int] | None:
    """Of the images as the network sees them, where sites have folders: of other data sets the server knows nothing."""
    parsed = spec.parse(config.data)
    if parsed.name != "folder":
        return None
    size = reading(config).get("size", Folder.size)
    transform = parse_transforms(parsed.options.get("test_transform", "normalise"))
    black = torch.zeros((), dtype=torch.uint8).expand(1, 3, size, size)
    _, channels, height, width = transform(black, torch.full((1, transform.draws), 0.5)).shape
    return channels, height, width


def load_site(path: Path, name: str, config: Config, classes: Sequence[str] | None = None, **own: Any) -> Federation:
    """The federation of this one site, cut as the configuration says. Without `classes`, labels follow its own. `own`
    are the options of `OWN`, as the site gives them."""
    options = check_reading(config)
    if path.is_file() != (spec.parse(config.data).name == "table"):
        raise DataError(
            f"The federation reads '{config.data}', and '{path}' is {'a' if path.is_file() else 'no'} file."
        )
    held_out = name in [*names(config.unseen), *names(options.get("unseen", ()))]
    dataset = site_reader(path, name, classes=classes, **reading(config), **own).read()
    cut = Cut(
        subsample=None if held_out else config.subsample or None,
        seed=options.get("seed", config.seed),
        **{key: options[key] for key in ("unseen_split", "train_transform", "test_transform") if key in options},
    )
    federation = cut.federation(dataset)
    if held_out:
        federation = replace(federation, clients=(), unseen=(cut.unseen_client(dataset, name),))
    return federation
