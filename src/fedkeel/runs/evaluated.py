"""How good a trained model is on new labelled images: the measures of a run's own test, of any data.

measures = fedkeel.Run("runs/hospitals").evaluate("new/")       # new/CLASS/*.png, or new/SITE/CLASS/*.png
measures.of("auc"), measures.by_class(), measures.confusion()
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.core.evaluation import Evaluation, Outputs
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.formats.folders import images_in, visible_folders
from fedkeel.data.formats.lists import read_table
from fedkeel.data.load import load_spec
from fedkeel.data.population import each_once
from fedkeel.data.reader import DATASETS
from fedkeel.engine.measuring import completed
from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import described
from fedkeel.runs.measures import Measures, document

if TYPE_CHECKING:
    from fedkeel.runs.trained import Trained

LAYOUT = "DIR/CLASS/*.png, or DIR/SITE/CLASS/*.png"
COLUMNS = {"path": "path", "label": "label", "site": "site"}  # of a table, unless the run's own has others


@dataclass(frozen=True)
class Labelled:
    """Images as `Trained.predict` takes them, and of each its class and its site."""

    images: Any
    classes: Sequence[Any]  # names, or numbers in the order of the model's classes
    sites: Sequence[str]


def evaluate(trained: Trained, data: Any, labels: Any = None, sites: Any = None) -> Measures:
    """The measures of a model on these data; see `Trained.evaluate`."""
    if (labels is not None or sites is not None) and isinstance(data, str | Path | Federation):
        raise FedkeelError("These data say themselves which class each image is of: leave 'labels' and 'sites' out.")
    given = read(data, trained) if labels is None else Labelled(data, list(labels), list(sites or ()))
    truth = numbers(given.classes, trained.labels)
    _, logits = trained.logits(given.images)
    of = list(map(str, given.sites)) or ["all"] * len(truth)
    if not len(truth) == len(of) == len(logits):
        raise FedkeelError(
            f"There are {len(logits):,} images, {len(truth):,} labels and {len(of):,} sites: give one for each image."
        )
    evaluations = []
    for site in dict.fromkeys(of):
        own = torch.tensor([place for place, name in enumerate(of) if name == site])
        outputs = Outputs(logits[own], truth[own], own)
        correct = int((outputs.logits.argmax(1) == outputs.labels).sum())
        loss = float(F.cross_entropy(outputs.logits, outputs.labels, reduction="sum"))
        whole = Evaluation(site, site, "test", "global", correct, len(own), loss, outputs=outputs)
        evaluations.append(completed(whole, {}, detailed=True))
    return Measures.of_document(document(evaluations, trained.labels, (), {}))


def numbers(given: Sequence[Any], classes: Sequence[str]) -> Tensor:
    """Of each image the number of its class; one that the model does not have is refused."""
    known = {name: number for number, name in enumerate(classes)}
    found = []
    for label in given:
        number = label.item() if isinstance(label, np.generic | Tensor) else label
        if isinstance(number, str):
            number = known.get(number, -1)
        if not isinstance(number, int) or not 0 <= number < len(classes):
            raise FedkeelError(
                f"There are images of the class '{label}', which the model has not: {_near(label, classes)}"
            )
        found.append(number)
    return torch.tensor(found, dtype=torch.int64)


def _near(label: Any, classes: Sequence[str]) -> str:
    few = f"its {len(classes)} classes are {', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}."
    return nearest(str(label), classes, otherwise=few)


# -- where images and classes come from ------------------------------------------------------------------------------
def read(data: Any, trained: Trained) -> Labelled:
    """From whatever has both: a folder, a table, an .npz file, a data set by name, a federation, pairs in Python."""
    if isinstance(data, str | os.PathLike):
        path = Path(data).expanduser()
        if path.is_dir():
            return in_folders(path, trained.labels)
        if path.is_file():
            return in_arrays(path) if path.suffix == ".npz" else in_table(path, trained)
        data = by_name(str(data))
    if isinstance(data, Federation):
        tests: dict[str, list[Tensor]] = {}
        for client in data.one_of_each():
            tests.setdefault(client.domain, []).append(client.test)
        return chosen(data, {domain: each_once(parts) for domain, parts in tests.items()})
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, np.ndarray | Tensor):
        pairs = [data[number] for number in range(len(data))]
        if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            return Labelled([image for image, _ in pairs], [label for _, label in pairs], ())
    raise FedkeelError(
        f"The data are {described(data)} and say no classes: give a folder ({LAYOUT}), a table, the name of a data "
        "set, pairs of image and label, or images with labels=[...]."
    )


def in_folders(root: Path, classes: Sequence[str]) -> Labelled:
    if images_in(root):
        raise FedkeelError(f"'{root}' has images right in it: put them into folders of their classes, {LAYOUT}.")
    inside = visible_folders(root)
    sites = [root] if any(folder.name in classes for folder in inside) else inside
    found = [
        (image, folder.name, site.name)
        for site in sites
        for folder in visible_folders(site)
        for image in images_in(folder)
    ]
    if not found:
        raise FedkeelError(f"There is no image of a class in '{root}': images are found in {LAYOUT}.")
    images, labels, of = zip(*found, strict=True)
    return Labelled(images, labels, of)


def in_table(file: Path, trained: Trained) -> Labelled:
    """A row for each image, or for each vector; paths begin where the table lies."""
    columns = COLUMNS | dict(trained.table)
    rows = read_table(file, [columns["label"]])
    if not rows:
        raise FedkeelError(f"'{file}' has no rows: give one for each image.")
    labels, site = [row[columns["label"]] for row in rows], columns["site"]
    sites = [row[site] for row in rows] if site in rows[0] else [file.stem] * len(rows)
    if trained.floats:
        return Labelled(file, labels, sites)
    if columns["path"] not in rows[0]:
        raise FedkeelError(f"'{file}' lacks the column '{columns['path']}': it says where each image lies.")
    return Labelled([file.parent / row[columns["path"]] for row in rows], labels, sites)


def in_arrays(file: Path) -> Labelled:
    """Arrays x_<site> and y_<site>, as `fedkeel data pack` writes them: all of them, whatever they were for."""
    dataset: Dataset = DATASETS.build("npz", root=str(file))
    return chosen(dataset, {site: split.all() for site, split in dataset.domains.items()})


def by_name(text: str) -> Federation:
    if text.partition("(")[0] not in DATASETS:
        raise FedkeelError(
            f"'{text}' is neither a file or folder that is there nor a data set: give a folder ({LAYOUT}), a table, "
            "an .npz file, or a name of 'fedkeel list data'."
        )
    return load_spec(text)


def chosen(data: Federation | Dataset, places: Mapping[str, Tensor]) -> Labelled:
    """These images of a store, site by site."""
    every = torch.cat([*places.values()])
    labels = [data.classes[number] for number in data.labels[every].tolist()]
    return Labelled(data.images[every], labels, [site for site, own in places.items() for _ in range(len(own))])
