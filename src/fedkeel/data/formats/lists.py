"""Text files that say what each image of a data set is: tables, and lists of what is for training and testing.

A line of `splits/<domain>_train.txt` is a path below the root, with or without a label after it. The class is always
that of the image's folder.
"""

import csv
import io
import logging
from collections.abc import Collection, Mapping, Sequence
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


def read_split(
    files: Mapping[str, Path], domain: str, position: Mapping[str, int], classes: Collection[str] | None = None
) -> list[IntArray] | None:
    """For each list the images that its lines name, in their order; None where there are no lists.

    `position` has the domain's images by their path below the root. Images in no list are not used. Where only some
    `classes` are read, lines that name an image of another one are passed over. A list for validation may be missing.
    """
    there = [file for file in files.values() if file.is_file()]
    if not there:
        return None
    for use, file in files.items():
        if file not in there and use != "validation":
            raise DataError(f"'{file}' is missing, but another list of '{domain}' is there: give both or none.")
    owner: dict[int, str] = {}
    for use, file in files.items():
        for place, line in read_lines(file).items() if file in there else ():
            spellings = [line, line.rsplit(maxsplit=1)[0]]  # a path may have blanks
            spellings += [path.replace("\\", "/") for path in spellings]
            image = next((position[path] for path in spellings if path in position), None)
            if image is None and classes is not None and class_of(line) not in classes:
                continue
            if image is None:
                raise DataError(
                    f"{place}, '{line}', is no image of the domain '{domain}': put the image there, or remove the line."
                )
            if image in owner:
                raise DataError(f"{place}, '{line}', is already in the {owner[image]} list: keep one.")
            owner[image] = use
    return [np.array([image for image, own in owner.items() if own == use], np.int64) for use in files]


def read_lists(
    folder: Path, domain: str, position: Mapping[str, int], classes: Collection[str] | None = None
) -> Parts | None:
    """The split that `folder/<domain>_{train,validation,test}.txt` give, if they are there."""
    files = {use: folder / f"{domain}_{use}.txt" for use in USES}
    found = read_split(files, domain, position, classes)
    return None if found is None else (found[0], found[1], found[2])


def class_of(line: str) -> str:
    """The class folder in `<domain>/<class>/<file> <label>`."""
    folders = line.replace("\\", "/").split("/")
    return folders[1] if len(folders) > 2 else ""
