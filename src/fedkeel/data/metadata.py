"""A CSV file that says what each image of a data set is."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from fedkeel.errors import DataError


def read_table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a comma- or tab-separated file that has at least these columns."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            table = csv.DictReader(stream, delimiter="\t" if "\t" in first else ",")
            present = table.fieldnames or []
            for column in columns:
                if column not in present:
                    shown = ", ".join(name for name in present if name)
                    raise DataError(f"'{file}' has the columns {shown}, and lacks '{column}': get the authors' file.")
            return list(table)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{file}' cannot be read as a table ({error}): download it again.") from error
