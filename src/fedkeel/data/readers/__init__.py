"""The data sets, one file each: a file in this folder registers itself."""

from fedkeel.registry import discover

discover(__name__)
