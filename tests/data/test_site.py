"""A site's own folder is read as one domain of 'folder' is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkeel.config import Config
from fedkeel.data import load
from fedkeel.data.site import check_reading, load_site
from fedkeel.errors import DataError
from tests.deploy.real import draw_images


@pytest.fixture
def root(tmp_path: Path) -> Path:
    draw_images(tmp_path)
    return tmp_path


def config(data: str = "folder(size=10)", **options: object) -> Config:
    return Config(data=data, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["north", "west"])
def test_a_site_has_the_images_and_labels_of_its_domain_in_the_same_order(root: Path, name: str) -> None:
    together = load("folder", root=root, size=10)
    alone = load_site(root / name, name, config(), together.classes)
    assert alone.classes == together.classes == ("cat", "dog", "owl")
    (mine,) = alone.clients
    for part in ("train", "validation", "test"):
        ours, theirs = getattr(mine, part), getattr(together[name], part)
        assert torch.equal(alone.images[ours], together.images[theirs])
        assert torch.equal(alone.labels[ours], together.labels[theirs])
    assert (mine.name, mine.domain) == (name, name)


def test_labels_follow_the_names_of_the_federation_s_classes(root: Path) -> None:
    site = load_site(root / "west", "west", config(), ["owl", "dog", "cat"])
    (mine,) = site.clients
    assert sorted(set(site.labels[mine.train].tolist())) == [1, 2]


def test_lists_beside_the_folder_say_what_is_for_what(root: Path) -> None:
    (root / "splits").mkdir()
    for use, numbers in (("train", (3, 1)), ("test", (0,))):
        lines = [f"north/{label}/{n}.png {at}" for at, label in enumerate(("cat", "dog", "owl")) for n in numbers]
        (root / "splits" / f"north_{use}.txt").write_text("\n".join(lines) + "\n")
    seeded = "folder(size=10, validation=0, split_seed=3)"  # which other sites, without lists, may draw by
    together = load("folder", root=root, size=10, validation=0)["north"]
    (mine,) = load_site(root / "north", "north", config(seeded), ("cat", "dog", "owl")).clients
    assert (len(mine.train), len(mine.test)) == (len(together.train), len(together.test)) == (6, 3)


def test_an_unseen_site_is_tested_on_all_its_images(root: Path) -> None:
    site = load_site(root / "west", "west", config(unseen="west"), None)
    assert list(site.clients) == []
    assert len(site["west"].test) == 12
    few = load_site(root / "west", "west", config("folder(size=10, unseen_split=test)", unseen="west"), None)
    assert len(few["west"].test) == 4


def test_a_site_s_table_is_read_as_its_rows_of_a_table_of_all(tmp_path: Path) -> None:
    rows = [f"{20 + n},{n / 3},{('ill', 'well')[n % 2]},{('north', 'south')[n // 30]},{n // 2}" for n in range(60)]
    heading = "age,dose,diagnosis,site,patient"
    (tmp_path / "all.csv").write_text("\n".join([heading, *rows]))
    together = load("table", file=tmp_path / "all.csv", label="diagnosis", group="patient")
    columns = [",".join([*row.split(",")[:3], row.split(",")[4]]) for row in rows[30:]]
    (tmp_path / "own.csv").write_text("\n".join(["age,dose,diagnosis,patient", *columns]))
    data = config("table(label=diagnosis)")
    alone = load_site(tmp_path / "own.csv", "south", data, together.classes, group="patient")
    assert (alone.columns, alone.domains) == (("age", "dose"), ["south"])
    for ours, theirs in zip(alone["south"].splits, together["south"].splits, strict=True):
        assert torch.equal(alone.images[ours], together.images[theirs])
        assert torch.equal(alone.labels[ours], together.labels[theirs])
    with pytest.raises(DataError, match=r"The federation reads 'folder\(size=10\)', and '.*own.csv' is a file"):
        load_site(tmp_path / "own.csv", "south", config())


def test_a_subsample_is_that_of_a_run_on_one_machine(root: Path) -> None:
    together = load("folder", root=root, size=10, subsample=6, seed=3)
    alone = load_site(root / "south", "south", config(subsample=6, seed=3), together.classes)
    assert torch.equal(alone.images[alone["south"].train], together.images[together["south"].train])


def test_a_class_that_the_federation_does_not_have_is_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"The class folder 'owl' of '.*north' is no class of the federation: choose"):
        load_site(root / "north", "north", config(), ["cat", "dog"])


def test_a_class_of_the_federation_never_leads_out_of_the_folder(root: Path) -> None:
    alone = load_site(
        root / "north", "north", config(), ["cat", "dog", "owl", "../south/cat", str(root / "south" / "dog")]
    )
    assert sorted(set(alone.labels.tolist())) == [0, 1, 2]


def test_a_folder_that_is_no_site_is_refused(root: Path) -> None:
    (root / "empty").mkdir()
    for place, said in (
        ("nowhere", "does not exist"),
        ("north/cat", "no images in class"),
        ("empty", "no images in cla"),
    ):
        with pytest.raises(DataError, match=said):
            load_site(root / place, "north", config())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": "digits-shift"}, "folders of images or tables"),
        ({"data": "folder(root=/etc)"}, "does not know the option 'root'"),
        ({"data": "folder(colour=red)"}, "does not know the option 'colour'"),
        ({"data": "folder(group=(a+)+b)"}, "The group .* is for each site to say: leave it out, and give --group"),
        ({"data": "folder(tolerate=0.5)"}, "give --tolerate to 'fedkeel join'"),
        ({"data": "folder(bits=12)"}, "give --bits to 'fedkeel join'"),
        ({"data": "folder", "partition": "iid(clients=2)"}, "each site is one client"),
    ],
)
def test_what_sites_cannot_read_is_refused_before_they_are_asked(options: dict[str, str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        check_reading(config(**options))


def test_a_site_says_itself_what_names_a_patient_and_how_many_files_may_be_broken(root: Path) -> None:
    (root / "north" / "cat" / "0.png").write_text("broken")
    with pytest.raises(DataError, match="cannot be decoded"):
        load_site(root / "north", "north", config())
    own = {"group": r"(\d)\d*\.png", "tolerate": 0.2}
    together = load("folder", root=root, size=10, **own)
    alone = load_site(root / "north", "north", config(), together.classes, **own)
    for ours, theirs in zip(alone["north"].splits, together["north"].splits, strict=True):
        assert torch.equal(alone.images[ours], together.images[theirs])
    with pytest.raises(DataError, match="have no group"):
        load_site(root / "north", "north", config(), group="(patient)")


def test_a_site_says_itself_how_many_bits_its_scanner_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for label in ("cat", "dog", "rare"):
        (tmp_path / label).mkdir()
        for number in range(1 if label == "rare" else 4):
            Image.fromarray(np.full((4, 4), 4095 - number, np.uint16)).save(tmp_path / label / f"{number}.tif")
    (tmp_path / "none").mkdir()
    site = load_site(tmp_path, "north", config(), bits=12)
    assert (site.images.min(), site.bits) == (255, 12)
    assert caplog.messages == [
        "'folder' has classes without a sample: 'none'.",
        "'folder' has classes with a single sample, which cannot be both trained on and tested: 'north/rare'.",
    ]
    load_site(tmp_path, "north", config())
    assert "9 of the 9 grey images of 16 bits use at most 12 of them" in caplog.text
