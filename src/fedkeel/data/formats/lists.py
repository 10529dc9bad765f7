"""Text files that say what each image of a data set is: tables, and lists of what is for training and testing.

A line of `splits/<domain>_train.txt` is a path below the root, with or without a label after it. The class is always
that of the image's folder.
"""

import csv
import io
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedkeel.data.dataset import Parts
from fedkeel.data.population import USES, IntArray
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")


def read_table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a file that has at least these columns, separated by commas, tabs or semicolons."""
    stream = io.StringIO(text_of(file), newline="")
    first = stream.readline()
    stream.seek(0)
    table = csv.DictReader(stream, delimiter="\t" if "\t" in first else ";" if "," not in first else ",")
    try:
        present, rows = table.fieldnames or [], list[dict[str, str]]()
        for column in columns:
            if column not in present:
                shown = ", ".join(name for name in present if name) or "(none)"
                raise DataError(f"'{file}' has the columns {shown}, and lacks '{column}': get the authors' file.")
        for row in table:
            if any(row[column] is None for column in columns):
                raise DataError(f"Line {table.line_num} of '{file}' ends too early: download it again.")
            rows.append(row)
        return rows
    except csv.Error as error:
        raise DataError(f"'{file}' cannot be read as a table ({error}): download it again.") from error


def text_of(file: Path) -> str:
    """UTF-8, or what Excel writes on Windows in western Europe."""
    content = file.read_bytes()
    for encoding in ("utf-8-sig", "cp1252") if b"\0" not in content else ():
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            if encoding == "cp1252":
                log.warning("'%s' is not in UTF-8, and is read as Windows's cp1252: save it as UTF-8.", file)
            return text
    raise DataError(f"'{file}' is not text in UTF-8 or cp1252: download it, or save it as UTF-8.")


def read_lines(file: Path) -> dict[str, str]:
    """The lines of a list that have anything in them, each by its place as an error names it."""
    lines = enumerate(text_of(file).splitlines(), start=1)
    return {f"Line {number} of '{file}'": line.strip() for number, line in lines if line.strip()}


def positions_in(files: Mapping[str, Path], find: Callable[[str, str], int | None]) -> list[IntArray]:
    """For each list the images that its lines name, in their order; `find(place, line)` is None to pass over one."""
    owner: dict[int, str] = {}
    for use, file in files.items():
        for place, line in read_lines(file).items() if file.is_file() else ():
            image = find(place, line)
            if image is None:
                continue
            if image in owner:
                raise DataError(f"{place}, '{line}', is already in the {owner[image]} list: keep one.")
            owner[image] = use
    return [np.array([image for image, own in owner.items() if own == use], np.int64) for use in files]


def read_lists(
    root: Path, domain: str, position: Mapping[str, int], folder: str = "splits", classes: Collection[str] | None = None
) -> Parts | None:
    """Positions for training, validation and testing in the lists' order, or None if there are no lists.

    `position` has the domain's images by their path below the root. Images in no list are not used. Where only some
    `classes` are read, lines that name an image of another one are passed over.
    """
    files = {use: root / folder / f"{domain}_{use}.txt" for use in USES}
    if not any(file.is_file() for file in files.values()):
        return None
    for use in ("train", "test"):
        if not files[use].is_file():
            raise DataError(f"'{files[use]}' is missing, but another list of '{domain}' is there: give both or none.")

    def find(place: str, line: str) -> int | None:
        for path in (line, line.rsplit(maxsplit=1)[0]):  # a path may have blanks
            for spelt in (path, path.replace("\\", "/")):
                if spelt in position:
                    return position[spelt]
        if classes is not None and class_of(line) not in classes:
            return None
        raise no_image(place, line, domain)

    train, validation, test = positions_in(files, find)
    return train, validation, test


def read_kfold(
    folders: Sequence[Path], domain: str, position: Mapping[str, int], labels: IntArray
) -> tuple[IntArray, IntArray] | None:
    """PACS's own lists, `<domain>_{train,crossval}_kfold.txt`: positions for training and cross-validation.

    A line is a path and a label that counts from 1. `<domain>_test_kfold.txt` lists every image of the domain, for
    testing on a domain that was left out; it needs no reading.
    """
    folder = next((folder for folder in folders if (folder / f"{domain}_train_kfold.txt").is_file()), None)
    if folder is None:
        return None
    files = {use: folder / f"{domain}_{use}_kfold.txt" for use in ("train", "crossval")}
    if not files["crossval"].is_file():
        raise DataError(
            f"'{files['crossval']}' is missing, but the train list of '{domain}' is there: give both or none."
        )

    def find(place: str, line: str) -> int:
        path, _, label = line.rpartition(" ")
        if path not in position:
            raise no_image(place, line, domain)
        own = labels[position[path]]
        if not label.isdigit() or int(label) - 1 != own:
            raise DataError(
                f"{place} gives '{path}' the label {label}, but its folder is class {own + 1}: the labels of these "
                "lists count the sorted class folders from 1."
            )
        return position[path]

    train, crossval = positions_in(files, find)
    return train, crossval


def no_image(place: str, line: str, domain: str) -> DataError:
    return DataError(
        f"{place}, '{line}', is no image of the domain '{domain}': put the image there, or remove the line."
    )


def class_of(line: str) -> str:
    """The class folder in `<domain>/<class>/<file> <label>`."""
    folders = line.replace("\\", "/").split("/")
    return folders[1] if len(folders) > 2 else ""
