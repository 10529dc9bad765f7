"""Look at a federation: a picture of its domains, and a table of its clients; and a data set as a tree of images."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedkeel.core.naming import file_name, visible
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.population import USES, Population, each_once
from fedkeel.errors import DataError
from fedkeel.options import Count, Range, checked

WIDEST = 30  # letters of a domain's name


@dataclass(frozen=True)
class ClientRow:
    """One client in numbers."""

    client: str
    domain: str
    train: int
    validation: int
    test: int
    classes: int
    unseen: bool


def describe(federation: Federation, most: int | None = None) -> list[ClientRow]:
    """A row for each client, the unseen ones last; `classes` counts those it trains on (unseen: is tested on).

    With `most`, only the first that many of those that train, and all unseen ones.

    >>> from fedkeel.data import load
    >>> describe(load("digits-shift"), most=1)[0].classes
    10
    """
    unseen = {client.name for client in federation.unseen}
    return [
        ClientRow(
            client=client.name,
            domain=client.domain,
            train=client.samples,
            validation=len(client.validation),
            test=len(client.test),
            classes=len(each_once([federation.labels[client.train if client.samples else client.test]])),
            unseen=client.name in unseen,
        )
        for client in itertools.chain(itertools.islice(federation.clients, most), federation.unseen)
    ]


def contact_sheet(federation: Federation, path: str | os.PathLike[str], *, per_class: int = 3, cell: int = 64) -> Path:
    """Write a PNG with a block of rows for each domain and a column for each class.

    A block has `per_class` rows, the first images of each class in the domain; each image is `cell` pixels wide. No
    example here, since it writes a file: `contact_sheet(load("digits-shift"), "digits.png")`.
    """
    checked(per_class, Count, "per_class")
    checked(cell, Annotated[int, Range(16)], "cell")
    if federation.images.is_floating_point():
        raise DataError(f"'{federation.name}' holds floats, of which nothing says what is black: it has no picture.")
    target = Path(path)
    if target.suffix.lower() not in ("", ".png"):
        raise DataError(f"The picture is a PNG and '{target.name}' ends in another way: call it '{target.stem}.png'.")
    font = ImageFont.load_default(size=14)
    names = [visible(name)[:WIDEST] for name in federation.domains]
    margin = int(max(map(font.getlength, names))) + 24
    gap, head = 10, 30
    block = per_class * cell + gap
    sheet = Image.new("RGB", (margin + federation.num_classes * cell + gap, head + len(names) * block), "white")
    pen = ImageDraw.Draw(sheet)
    for column, label in enumerate(federation.classes):
        pen.text((margin + column * cell + cell // 2, head // 2), visible(label)[: cell // 8], "black", font, "mm")
    for row, domain in enumerate(federation.domains):
        top = head + row * block
        pen.text((margin - 12, top + (block - gap) // 2), names[row], "black", font, "rm")
        members = members_of(federation, domain)
        labels = federation.labels[members]
        for column in range(federation.num_classes):
            for place, index in enumerate(members[labels == column][:per_class].tolist()):
                pixels = federation.images[index].permute(1, 2, 0)
                image = Image.fromarray(pixels.expand(-1, -1, 3).contiguous().numpy())
                # Enlarging keeps the pixels visible; a large image is reduced smoothly.
                smooth = Image.Resampling.BILINEAR if image.width > cell else Image.Resampling.NEAREST
                sheet.paste(image.resize((cell - 2, cell - 2), smooth), (margin + column * cell, top + place * cell))
    try:
        sheet.save(target, format="PNG")
    except OSError as error:
        raise DataError(f"The picture cannot be written to '{path}' ({error}): give a path that can be.") from error
    return target


def members_of(federation: Federation, domain: str) -> Tensor:
    """Every image of a domain that any of its clients holds, each once."""
    parts = [part for client in federation.one_of_each() if client.domain == domain for part in client.splits]
    if isinstance(federation.clients, Population):
        parts += [group.used() for group in federation.clients.groups if group.domain == domain]
    return each_once(parts)


def write_tree(dataset: Dataset, out: str | os.PathLike[str]) -> Path:
    """The images as PNG files, which lose nothing, DIR/<domain>/<class>/, with a list for each domain and use in
    DIR/splits: what `folder` reads."""
    target = Path(out).expanduser()
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise DataError(f"'{target}' exists already: give a new name, or remove it first.")
    if dataset.images.is_floating_point() or "splits" in dataset.domains:
        raise DataError(f"'{dataset.name}' holds floats, or has a domain 'splits': it cannot be a tree of images.")
    classes = [file_name(label) for label in dataset.classes]
    try:
        (target / "splits").mkdir(parents=True)
        for domain, split in ((file_name(name), split) for name, split in dataset.domains.items()):
            for label in classes:
                (target / domain / label).mkdir(parents=True)
            for use, positions in zip(USES, split, strict=True):
                lines = []
                for index in positions.tolist():
                    picture = dataset.images[index].permute(1, 2, 0).numpy()
                    lines.append(f"{domain}/{classes[int(dataset.labels[index])]}/{index:07d}.png\n")
                    Image.fromarray(picture.squeeze(2) if picture.shape[2] == 1 else picture).save(
                        target / lines[-1].strip()
                    )
                if lines or use != "validation":
                    (target / "splits" / f"{domain}_{use}.txt").write_text("".join(lines), "utf-8")
    except OSError as error:
        raise DataError(f"'{target}' cannot be written ({error}): give a path that can be.") from error
    return target
