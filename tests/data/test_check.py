"""`fedkeel data list`, `check` and `pack`, from Python."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest

from fedkeel.core.naming import file_name
from fedkeel.data import DATASETS, Dataset, load
from fedkeel.data.check import Count, check, standings
from fedkeel.data.formats.writing import write
from fedkeel.data.reader import PUBLISHED
from fedkeel.data.readers.pacs import PACS
from fedkeel.errors import DataError, FedkeelError
from tests.data.made_up import image, noise, tree

TOTALS = {
    "camelyon17": 455_954, "cifar10": 60_000, "cifar100": 60_000, "digits-dg": 24_000, "digits-five": 737_540,
    "domainnet": 22_851, "ham10000": 10_015, "office-caltech-10": 2_533, "pacs": 9_991, "stl10": 13_000,
    "tiny-imagenet": 110_000, "vlcs": 10_729,
}  # fmt: skip


def test_every_published_data_set_has_a_reader_and_a_size() -> None:
    assert {name: entry().total() for name, entry in PUBLISHED.items()} == TOTALS
    for name, entry in PUBLISHED.items():
        assert name in DATASETS
        assert urlparse(entry.home).scheme in ("http", "https")
        assert entry.what.endswith(".")
        assert entry.licence
        assert entry.layout
        assert "root" in DATASETS.entry(name).options()


def test_all_of_domainnet_has_586575_images(tmp_path: Path) -> None:
    tree(tmp_path, ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), ("axe", "bee"), 1)
    found = check("domainnet(classes=all)", tmp_path)
    assert sum(count.published[0] for count in found.counts) == 586_575
    assert [count.found for count in found.counts] == [2] * 6
    some = check("domainnet(classes=[bee])", tmp_path)
    assert [(count.found, count.published) for count in some.counts] == [(1, ())] * 6
    assert some.complete


def test_a_check_counts_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 2)
    found = check("pacs")
    assert found.root == str(tmp_path / "pacs")
    assert found.counts[0] == Count("art_painting", "images", 14, (2048,))
    assert "The domain 'photo' has 14 images, and 1,670 are published." in found.problems
    assert not found.complete
    assert found.summary() == "56 images, not as many as published"
    assert [found.problems, found.counts] == [check(f"pacs(root={tmp_path / 'pacs'})").problems, found.counts]


def test_a_check_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match=r"no data set named 'pac': did you mean 'pacs'\?"):
        check("pac", tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        check("pacs", image(tmp_path / "a.png"))
    with pytest.raises(DataError, match="The root is given twice"):
        check(f"pacs(root={tmp_path})", tmp_path)
    with pytest.raises(DataError, match="A check of pacs takes no option 'size'"):
        check("pacs(size=3)", tmp_path)


def test_the_list_says_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)
    assert [standing.reader.name for standing in standings()] == sorted(TOTALS)
    assert {standing.found for standing in standings()} == {"nothing (FEDKEEL_DATA is not set)"}
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    tree(tmp_path / "VLCS", ("Caltech101", "LabelMe", "SUN09", "VOC2007"), ("bird", "car", "chair", "dog", "person"), 1)
    (tmp_path / "stl10").write_text("a file, not a folder")
    found = {standing.reader.name: standing.found for standing in standings()}
    assert found["vlcs"] == f"{tmp_path / 'VLCS'}: 20 images, not as many as published: 'fedkeel data check vlcs' tells"
    assert "is not a folder" in found["stl10"]
    assert found["pacs"] == f"nothing (pacs or PACS in '{tmp_path}')"


# -- pack -----------------------------------------------------------------------------------------------------
def splits(source: Dataset) -> dict[tuple[str, str], list[tuple[int, bytes]]]:
    """The labels and pixels of every split of every domain, in a fixed order."""
    return {
        (domain, use): sorted(
            (int(source.labels[i]), source.images[i].numpy().tobytes()) for i in getattr(split, use).tolist()
        )
        for domain, split in source.domains.items()
        for use in ("train", "validation", "test")
    }


@pytest.mark.parametrize("out", ["pack.npz", "folder"])
def test_a_pack_is_read_as_what_it_was_made_from(tmp_path: Path, out: str) -> None:
    source = DATASETS.build("pacs", root=tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 10), size=5)
    target = write(source, tmp_path / out)
    assert target == tmp_path / out
    again = DATASETS.build("npz", root=target) if out == "pack.npz" else DATASETS.build("folder", root=target, size=5)
    assert again.classes == source.classes
    assert splits(again) == splits(source)
    with pytest.raises(DataError, match="exists already"):
        write(source, target)


def test_a_grey_pack_without_validation_stays_grey(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    x = noise(12, 6, 6)
    np.savez(file, x_a=x[:8], y_a=np.arange(8) % 2, x_a_test=x[8:], y_a_test=np.arange(4) % 2)
    source = DATASETS.build("npz", root=file, validation=0)
    assert "x_a_validation" not in np.load(write(source, tmp_path / "b.npz")).files
    assert splits(DATASETS.build("npz", root=tmp_path / "b.npz", validation=0)) == splits(source)
    write(source, tmp_path / "tree")
    grey = DATASETS.build("folder", root=tmp_path / "tree", size=6, validation=0)
    assert grey.images[:, 0].reshape(12, -1).sum(1).sort().values.tolist() == sorted(
        int(picture.sum()) for picture in x.astype(int)
    )


def test_an_npz_may_have_validation_images_of_its_own(tmp_path: Path) -> None:
    x = noise(20, 4, 4, 3)
    np.savez(
        tmp_path / "p.npz", x_a=x[:10], y_a=np.arange(10) % 2, x_a_validation=x[10:13], y_a_validation=[0, 1, 0],
    )  # fmt: skip
    client = (federation := load("npz", root=tmp_path / "p.npz", test=0.2))["a"]
    assert federation.domains == ["a"]
    assert np.array_equal(federation.images[client.validation].permute(0, 2, 3, 1).numpy(), x[10:13])
    assert (client.samples, len(client.test)) == (8, 2)


def test_a_pack_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    source = DATASETS.build("digits-shift")
    (tmp_path / "file").write_text("")
    for out in ("file/pack.npz", "file/folder"):
        with pytest.raises(DataError, match="cannot be written"):
            write(source, tmp_path / out)


def test_the_sizes_of_a_pack_are_those_of_its_images(tmp_path: Path) -> None:
    source = DATASETS.build("digits-shift")
    file = write(source, tmp_path / "digits.npz")
    assert file.stat().st_size > math.prod(source.images.shape)
    assert load("npz", root=file).image_shape == (3, 32, 32)


HOSTILE = ("/tmp/evil", "../..", "..", ".", "", "a/b", "a\nb", " lead", ".hidden", "Zürich", "x" * 300, "%2F")


@pytest.mark.parametrize("out", ["pack.npz", "deep/folder"])
def test_whatever_names_a_pack_has_it_is_written_where_it_should_be(tmp_path: Path, out: str) -> None:
    x = np.arange(3 * 2 * 2, dtype=np.uint8).reshape(-1, 2, 2, 1).repeat(len(HOSTILE), 0)
    y = np.arange(len(x)) % len(HOSTILE)
    arrays = {f"x_{domain}": x for domain in HOSTILE} | {f"y_{domain}": y for domain in HOSTILE}
    np.savez(tmp_path / "given.npz", classes=np.array(HOSTILE), **arrays)
    source = DATASETS.build("npz", root=tmp_path / "given.npz")
    assert source.classes == HOSTILE
    place = tmp_path / "place"
    target = write(source, place / out)
    written = [path for path in tmp_path.rglob("*") if path.name != "given.npz" and path != place]
    assert all(path.is_relative_to(place / out.partition("/")[0]) for path in written)
    again = DATASETS.build(
        "npz" if out == "pack.npz" else "folder", root=target, **({} if "npz" in out else {"size": 2})
    )
    wanted = HOSTILE if out == "pack.npz" else tuple(file_name(name) for name in HOSTILE)
    assert sorted(again.domains) == sorted(wanted)
    assert sorted(again.classes) == sorted(wanted)
    for domain, name in zip(HOSTILE, wanted, strict=True):
        mine, theirs = source.domains[domain].test, again.domains[name].test
        assert again.images[theirs].float().mean(1).equal(source.images[mine].float().mean(1))
        told = dict(zip(HOSTILE, wanted, strict=True))
        assert [again.classes[i] for i in again.labels[theirs]] == [
            told[source.classes[i]] for i in source.labels[mine]
        ]


def test_names_that_a_pack_cannot_keep_apart_are_refused(tmp_path: Path) -> None:
    def source(*domains: str) -> Dataset:
        arrays = {
            f"{kind}_{name}": np.zeros((8, 2, 2)[: 3 if kind == "x" else 1], np.uint8)
            for name in domains
            for kind in "xy"
        }
        np.savez(tmp_path / "given.npz", **arrays)
        return DATASETS.build("npz", root=tmp_path / "given.npz")

    part = source("a")
    twice = dataclasses.replace(part, domains={"a": part.domains["a"], "a_test": part.domains["a"]})
    for odd, sentence in (
        (twice, "for a part of 'a'"),
        (dataclasses.replace(part, domains={"a\0b": part.domains["a"]}), "array"),
    ):
        with pytest.raises(DataError, match=sentence):
            write(odd, tmp_path / "out.npz")
        write(odd, tmp_path / sentence)
    with pytest.raises(DataError, match="called 'splits'"):
        write(source("splits"), tmp_path / "out")


def test_a_folder_of_another_name_than_its_class_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.savez(tmp_path / "g.npz", x_a=np.zeros((4, 2, 2), np.uint8), y_a=np.zeros(4, np.int64), classes=["a/b"])
    with caplog.at_level(logging.WARNING):
        write(DATASETS.build("npz", root=tmp_path / "g.npz"), tmp_path / "out")
    assert "'a/b' is no name of a folder: it is written, and will be read, as 'a%2Fb'." in caplog.text
