"""The real data sets, where FEDKEEL_DATA has them: counts, labels and that they can be trained on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedkeel.data import DATASETS, load
from fedkeel.data.reader import standing

pytestmark = pytest.mark.slow


@pytest.fixture
def _has(request: pytest.FixtureRequest) -> None:
    base = os.environ.get("FEDKEEL_DATA", "")
    if not base:
        pytest.skip("FEDKEEL_DATA is not set")
    if not (Path(base) / request.param).is_dir():
        pytest.skip(f"FEDKEEL_DATA has no {request.param}")


@pytest.mark.usefixtures("_has")
class TestRealData:
    @pytest.mark.parametrize("_has", ["pacs"], indirect=True)
    def test_pacs_is_complete_and_greg_takes_its_subset(self) -> None:
        assert standing("pacs").problems == []
        source = DATASETS.build("pacs", size=8)
        assert {name: len(split.all()) for name, split in source.domains.items()} == {
            "art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929,
        }  # fmt: skip
        subset = DATASETS.build("pacs", size=8, subset="greg")
        assert [(len(s.train), len(s.validation), len(s.test)) for s in subset.domains.values()] == [
            (584, 233, 615), (584, 233, 704), (584, 233, 501), (584, 233, 1179),
        ]  # fmt: skip

    @pytest.mark.parametrize("_has", ["office_caltech_10"], indirect=True)
    def test_office_caltech_10_has_the_lists_of_fedbn(self) -> None:
        assert standing("office-caltech-10").problems == []
        federation = load("office-caltech-10", size=8, subset="fedbn")
        assert [(c.name, c.samples, len(c.validation), len(c.test)) for c in federation.clients] == [
            ("amazon", 62, 50, 192), ("caltech", 62, 50, 225), ("dslr", 62, 50, 32), ("webcam", 62, 50, 59),
        ]  # fmt: skip

    @pytest.mark.parametrize("_has", ["cifar10"], indirect=True)
    def test_cifar10_is_complete(self) -> None:
        assert standing("cifar10").problems == []
        client = load("cifar10").clients[0]
        assert (client.samples, len(client.test)) == (50000, 10000)

    @pytest.mark.parametrize("_has", ["digits"], indirect=True)
    def test_the_digits_have_the_numbers_of_their_readme(self) -> None:
        source = DATASETS.build("digits-five", domains="usps")
        assert [(len(split.train), len(split.test)) for split in source.domains.values()] == [(7291, 2007)]
        whole = DATASETS.build("digits-five")
        for domain, train, test in (
            ("mnist", 20000, 5000), ("mnistm", 8000, 2000), ("svhn", 8000, 2000), ("synth_fonts", 8000, 2000),
        ):  # fmt: skip
            assert [len(part) for part in whole.domains[domain]] == [train, 0, test]
        fedbn = DATASETS.build("digits-five", domains=["usps", "svhn"], subset="fedbn")
        assert {name: len(split.train) for name, split in fedbn.domains.items()} == {"usps": 743, "svhn": 743}
        assert len(fedbn.domains["usps"].test) == 1860
