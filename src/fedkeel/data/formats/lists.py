"""Text files that say what each image of a data set is: tables, and lists of what is for training and testing.

A line of `splits/<domain>_train.txt` is a path below the root, with or without a label after it. The class is always
that of the image's folder.
"""

import csv
import io
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedkeel.data.dataset import Parts
from fedkeel.data.population import USES, IntArray
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")


def read_table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a file that has at least these columns, separated by commas, tabs or semicolons."""
    text = text_of(file)
    first = text.partition("\n")[0]
    table = csv.DictReader(
        io.StringIO(text, newline=""), delimiter="\t" if "\t" in first else ";" if "," not in first else ","
    )
    try:
        present, rows = table.fieldnames or [], list(table)
    except csv.Error as error:
        raise DataError(f"'{file}' cannot be read as a table ({error}): download it again.") from error
    for column in columns:
        if column not in present:
            shown = ", ".join(filter(None, present)) or "(none)"
            raise DataError(f"'{file}' has the columns {shown}, and lacks '{column}': get the authors' file.")
    for number, row in enumerate(rows, start=1):
        if any(row[column] is None for column in columns):
            raise DataError(f"Row {number} of '{file}' ends too early: download it again.")
    return rows


def text_of(file: Path) -> str:
    """UTF-8, or what Excel writes on Windows in western Europe."""
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        try:
            text = content.decode("cp1252")
        except UnicodeDecodeError:
            text = "\0"
    if "\0" in text:
        raise DataError(f"'{file}' is not text in UTF-8 or cp1252: download it, or save it as UTF-8.")
    log.warning("'%s' is not in UTF-8, and is read as Windows's cp1252: save it as UTF-8.", file)
    return text


def read_lines(file: Path) -> dict[str, str]:
    """The lines of a list that have anything in them, each by its place as an error names it."""
    lines = enumerate(text_of(file).splitlines(), start=1)
    return {f"Line {number} of '{file}'": line.strip() for number, line in lines if line.strip()}


def read_lists(
    files: Mapping[str, Path], domain: str, position: Mapping[str, int], classes: Collection[str] | None = None
) -> list[IntArray] | None:
    """For each list the images that its lines name, in their order; None where there are no lists.

    `position` has the domain's images by their path below the root. Images in no list are not used. Where only some
    `classes` are read, lines that name an image of another one are passed over. A list for validation may be missing.
    """
    there = {use: file for use, file in files.items() if file.is_file()}
    if not there:
        return None
    owner: dict[int, str] = {}
    for use, file in files.items():
        if use not in there and use != "validation":
            raise DataError(f"'{file}' is missing, but another list of '{domain}' is there: give both or none.")
        for place, line in read_lines(file).items() if use in there else ():
            spellings = [line, line.rsplit(maxsplit=1)[0]]  # a path may have blanks
            spellings += [path.replace("\\", "/") for path in spellings]
            image = next((position[path] for path in spellings if path in position), None)
            if image is None and classes is not None and class_of(line) not in classes:
                continue
            if image is None or image in owner:
                why = "is no image" if image is None else f"is already in the {owner[image]} list"
                raise DataError(f"{place}, '{line}', {why} of the domain '{domain}': correct or remove the line.")
            owner[image] = use
    return [np.array([image for image, own in owner.items() if own == use], np.int64) for use in files]


def split_lists(
    folder: Path, domain: str, position: Mapping[str, int], classes: Collection[str] | None = None
) -> Parts | None:
    """The split that `folder/<domain>_{train,validation,test}.txt` give, if they are there."""
    found = read_lists({use: folder / f"{domain}_{use}.txt" for use in USES}, domain, position, classes)
    return None if found is None else (found[0], found[1], found[2])


def class_of(line: str) -> str:
    """The class folder in `<domain>/<class>/<file> <label>`."""
    folders = line.replace("\\", "/").split("/")
    return folders[1] if len(folders) > 2 else ""
