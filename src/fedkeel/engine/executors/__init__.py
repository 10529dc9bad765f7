"""Where clients run. A file in this folder registers itself."""

from fedkeel.registry import discover

discover(__name__)
