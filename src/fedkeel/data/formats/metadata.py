"""Text files that say what each image of a data set is: tables and lists."""

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
                    shown = ", ".join(name for name in present if name) or "(none)"
                    raise DataError(f"'{file}' has the columns {shown}, and lacks '{column}': get the authors' file.")
            rows = []
            for row in table:
                if any(row[column] is None for column in columns):
                    raise DataError(f"Line {table.line_num} of '{file}' ends too early: download it again.")
                rows.append(row)
            return rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{file}' cannot be read as a table ({error}): download it again.") from error


def read_lines(file: Path) -> list[str]:
    """The lines of a list."""
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"'{file}' is not text in UTF-8 ({error}): download it, or save it as UTF-8.") from error
