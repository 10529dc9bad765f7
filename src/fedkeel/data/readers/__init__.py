"""The data sets, one file each: a file in this folder registers itself."""

from __future__ import annotations

from fedkeel.registry import discover

discover(__name__)
