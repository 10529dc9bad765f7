"""The images of one site of a real federation: `folder/<class>/*.png`, read as the server's configuration says.

The same rules as for `folder`, of which a site is one domain: a federation over a network and a run over the folders
side by side on one machine train on the same images in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedkeel import spec
from fedkeel.config import Config
from fedkeel.data import partition as partitions
from fedkeel.data import rules
from fedkeel.data.federation import Federation
from fedkeel.data.listing import Listing, assemble, images_in, visible_folders
from fedkeel.data.load import cut, unseen_client
from fedkeel.data.readers.folder import scan_domain
from fedkeel.data.source import Source, names, whole
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError, nearest

LAYOUT = "folder/<class>/*.png (or jpg, jpeg, bmp, webp)"


def read_site(
    folder: Path,
    name: str,
    size: int = 32,
    validation: float = 0.15,
    test: float = 0.25,
    split_seed: int = 0,
    classes: str | Sequence[str] | None = None,
) -> Source:
    """One domain called `name`. `classes` are those of the whole federation, by name."""
    own = class_folders(folder)
    order = tuple(own) if classes is None else tuple(names(classes))
    for label in own:
        if label not in order:
            raise DataError(
                f"The class folder '{label}' of '{folder}' is no class of the federation: {nearest(label, order)}"
            )
    listing = Listing("folder", folder, order, {name: scan_domain(folder, order)})
    parts = rules.by_shares(listing.domains, validation, test, split_seed)
    return assemble(listing, parts, size, train="flip+normalise", test="normalise")


def class_folders(folder: Path) -> list[str]:
    """The names of the classes that a site has, or a sentence that says which layout is expected."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder: a site's images lie in {LAYOUT}.")
    if images_in(folder):
        raise DataError(
            f"'{folder}' has images right in it: put them into folders named after their classes, {LAYOUT}."
        )
    found = [path.name for path in visible_folders(folder)]
    if not found:
        raise DataError(f"There are no class folders in '{folder}': a site's images lie in {LAYOUT}.")
    return found


OPTIONS = ("size", "validation", "test", "split_seed")
CUTTING = ("classes", "unseen", "unseen_split", "seed", "partition", "train_transform", "test_transform")


def check_reading(config: Config) -> dict[str, Any]:
    """The options of the data set, if sites can read their images so."""
    parsed = spec.parse(config.data)
    if parsed.name != "folder":
        raise DataError(f"The data set is '{config.data}', but sites have folders of images: give 'folder(size=64)'.")
    partition = parsed.options.get("partition", config.partition)
    if partition != "domains":
        raise DataError(f"The partition is '{partition}', but over a network each site is one client: leave it out.")
    for option in parsed.options:
        if option not in (*OPTIONS, *CUTTING):
            raise DataError(f"A site does not know the option '{option}' of '{config.data}': leave it out.")
    return dict(parsed.options)


def image_shape(config: Config) -> tuple[int, int, int] | None:
    """Of the images as the network sees them, where sites have folders: of other data sets the server knows nothing."""
    parsed = spec.parse(config.data)
    if parsed.name != "folder":
        return None
    size = whole("size in folder", parsed.options.get("size", 32), 1)
    transform = parse_transforms(parsed.options.get("test_transform", "normalise"))
    black = torch.zeros((), dtype=torch.uint8).expand(1, 3, size, size)
    _, channels, height, width = transform(black, torch.full((1, transform.draws), 0.5)).shape
    return channels, height, width


def load_site(folder: Path, name: str, config: Config, classes: Sequence[str] | None = None) -> Federation:
    """The federation of this one site, cut as the configuration says. Without `classes`, labels follow its own."""
    options = check_reading(config)
    held_out = name in [*names(config.unseen), *names(options.get("unseen", ()))]
    transforms: dict[str, Any] = {key: parse_transforms(options[key]) for key in CUTTING[-2:] if key in options}
    reading = {key: value for key, value in options.items() if key in OPTIONS}
    source = read_site(folder, name, classes=classes, **reading)
    federation = cut(
        source,
        partitions.build("domains"),
        subsample=None if held_out else config.subsample or None,
        seed=options.get("seed", config.seed),
        **transforms,
    )
    if held_out:
        client = unseen_client(name, source.domains[name], options.get("unseen_split", "all"))
        federation = replace(federation, clients=(), unseen=(client,))
    return federation
