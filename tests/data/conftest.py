"""Decoded images of made-up data must not land in the cache of the person who runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
