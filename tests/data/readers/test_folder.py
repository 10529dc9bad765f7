"""Trees of one's own images."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkeel.data import load, load_spec
from fedkeel.errors import DataError, FedkeelError
from tests.data.made_up import image


def colour_of(domain: int, label: int, number: int) -> tuple[int, int, int]:
    return 40 * domain, 50 * label, number


def make_tree(root: Path, images: int = 8, domains: tuple[str, ...] = ("art", "photo"), suffix: str = "png") -> Path:
    for d, domain in enumerate(domains):
        for c, label in enumerate(("cat", "dog")):
            for n in range(images):
                image(root / domain / label / f"{n:03d}.{suffix}", colour_of(d, c, n))
    return root


def warnings_of(root: Path, caplog: pytest.LogCaptureFixture, **options: object) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedkeel"):
        load("folder", root=root, **options)
    return caplog.messages


def test_a_tree_is_read_with_its_domains_classes_paths_and_pixels(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree", images=60)
    (root / "art" / "cat" / "007.png").write_bytes(b"broken")
    federation = load_spec("folder(size=5)", root=root)
    assert federation.images.shape == (240, 3, 5, 5)
    assert (federation.classes, federation.domains) == (("cat", "dog"), ["art", "photo"])
    assert [[len(part) for part in client.splits] for client in federation.clients] == [[72, 18, 29], [72, 18, 30]]
    assert len(federation.paths) == len(federation.images)
    for index in torch.cat([part for client in federation for part in client.splits]).tolist():
        domain, label, number = Path(federation.paths[index]).parts
        assert label == federation.classes[federation.labels[index]]
        place = (("art", "photo").index(domain), ("cat", "dog").index(label), int(number[:3]))
        assert federation.images[index, :, 2, 2].tolist() == list(colour_of(*place))


def test_the_split_depends_on_its_own_seed_only(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    first, run, split = (
        load("folder", root=root, **options)["art"].test for options in ({}, {"seed": 9}, {"split_seed": 9})
    )
    assert first.equal(run)
    assert not first.equal(split)


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "bmp", "webp", "tif", "TIFF", "gif"])
def test_every_image_format_is_read(tmp_path: Path, suffix: str) -> None:
    assert len(load("folder", root=make_tree(tmp_path, images=3, suffix=suffix)).images) == 12


def test_a_class_that_a_site_lacks_can_be_declared(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    federation = load_spec(f"folder(root={root}, classes=[bird, cat, dog])")
    assert federation.classes == ("bird", "cat", "dog")
    assert sorted(set(federation.labels.tolist())) == [1, 2]
    with pytest.raises(DataError, match=r"The class folder 'dog' of '.*' is no class of the federation: choose"):
        load("folder", root=root, classes=["cat", "bird"])


# -- lists ----------------------------------------------------------------------------------------------------
def lists(root: Path, domain: str = "art", **uses: str | bytes) -> Path:
    (root / "splits").mkdir(exist_ok=True)
    for use, content in uses.items():
        file = root / "splits" / f"{domain}_{use}.txt"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def test_lists_decide_the_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path, domains=("art",))
    lists(root, train="art/dog/003.png 1\nart/cat/000.png 0\n\nart/cat/007.png\n", test="art/dog/001.png\n")
    federation = load("folder", root=root, validation=0)
    client = federation["art"]
    # Only the listed images are stored, in the order of the tree; cats come before dogs.
    assert federation.images[client.train, 1:, 0, 0].tolist() == [[0, 0], [0, 7], [50, 3]]
    assert federation.images[client.test, 1:, 0, 0].tolist() == [[50, 1]]
    assert (len(federation.images), len(client.validation)) == (4, 0)
    assert "12 images of 'art' are in none of its lists and are not used." in caplog.text
    # As Windows writes them, with the mark that it puts first.
    windows = b"\xef\xbb\xbfart\\dog\\003.png 1\r\nart\\cat\\000.png\r\nart\\cat\\007.png\r\n"
    again = load("folder", root=lists(root, train=windows), validation=0)
    assert again["art"].train.equal(client.train)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("art/cat/999.png 0", "art/cat/001.png", "Line 1 of .*art_train.txt', 'art/cat/999.png 0', is no image of"),
        ("art/cat/001.png", "art/cat/001.png", "is already in the train list"),
        ("art/cat/001.png", None, "art_test.txt' is missing, but another list of 'art' is there"),
        (b"art/dog/\x81.png", "art/cat/001.png", "art_train.txt' is not text in UTF-8 or cp1252"),
    ],
)
def test_lists_that_contradict_the_tree_are_refused(
    tmp_path: Path, train: str | bytes, test: str | None, message: str
) -> None:
    root = make_tree(tmp_path, domains=("art",))
    lists(root, train=train, **({} if test is None else {"test": test}))
    with pytest.raises(DataError, match=message):
        load("folder", root=root)


def test_lists_for_some_domains_only_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path, domains=("art", "photo", "sketch"))
    lists(root, "photo", train="photo/cat/000.png\nphoto/dog/000.png\n", test="photo/cat/001.png\nphoto/dog/001.png\n")
    assert warnings_of(root, caplog) == [
        "12 images of 'photo' are in none of its lists and are not used.",
        f"Some domains of '{root}' have lists in splits/, but not art and sketch: those are split at random.",
    ]


# -- what is told ---------------------------------------------------------------------------------------------
def test_files_that_are_not_read_are_told_but_for_what_systems_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(tmp_path)
    litter = (
        ".DS_Store",
        "art/Thumbs.db",
        "art/cat/._0.tif",
        "art/cat/.x/1.tif",
        "__MACOSX/art/2.tif",
        "art/@eaDir/3.png",
    )
    for file in (*litter, ".git/objects/1"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"content")
    (root / "art" / "cat" / "x.png").mkdir()
    assert warnings_of(root, caplog) == []
    for file in ("art/cat/1.heic", "art/dog/IM0001", "photo/cat/deep/1.png", "photo/x.svg", "labels.csv"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"content")
    (told,) = warnings_of(root, caplog)
    assert told.startswith(f"5 files of '{root}' are not read, 'art/cat/1.heic', 'art/dog/IM0001', 'labels.csv' and 2 ")


def test_a_broken_image_is_named_and_left_out_unless_there_are_too_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(tmp_path, images=50)
    (root / "art" / "cat" / "004.png").write_bytes(b"not an image")
    (root / "art" / "cat" / "005.png").unlink()
    (root / "art" / "cat" / "005.png").symlink_to(tmp_path / "nowhere.png")
    for _ in range(2):  # decoded, then cached
        (told,) = warnings_of(root, caplog, size=4)
        assert told.startswith("2 of the 200 images of 'folder' cannot be decoded and are left out: '")
        assert "art/cat/004.png (it is no image of a kind that is read)', '" in told
        federation = load("folder", root=root, size=4)
        held = torch.cat([p for c in federation.clients for p in c.splits]).sort().values
        assert held.tolist() == [n for n in range(200) if n not in (4, 5)]
        # What follows the gap still has its own label and pixels.
        assert federation.images[6, :, 0, 0].tolist() == list(colour_of(0, 0, 6))
    (root / "art" / "cat" / "006.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"3 of the 200 images of 'folder' cannot be decoded.*tolerate=0.015"):
        load("folder", root=root, size=4)
    assert len(load("folder", root=root, size=4, tolerate=0.015)["art"].splits.all()) == 97


def test_empty_classes_and_single_images_are_told_in_a_sentence_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(tmp_path, domains=("art", "photo", "sketch"))
    for file in [*(root / "art" / "dog").iterdir(), *(root / "photo" / "cat").iterdir()]:
        file.unlink()
    for domain in ("art", "sketch"):
        for file in list((root / domain / "cat").iterdir())[1:]:
            file.unlink()
    untested = "'folder' has domains without test samples: 'art'."
    single = "'folder' has classes with a single sample, which cannot be both trained on and tested: "
    assert warnings_of(root, caplog) == [untested, f"{single}'art/cat', 'sketch/cat'."]
    # Of those that are left out every image is tested.
    assert warnings_of(root, caplog, unseen=["art", "sketch"]) == [
        "'folder' has classes that are tested and that nobody trains on: 'cat'."
    ]
    assert warnings_of(make_tree(tmp_path / "other"), caplog, test=0, validation=0, unseen="photo") == []


# -- layouts that are not this --------------------------------------------------------------------------------
def test_other_layouts_are_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree")
    with pytest.raises(DataError, match=r"no images in class folders of '.*cat': put them into"):
        load("folder", root=root / "art")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="There are no images in"):
        load("folder", root=tmp_path / "empty")
    make_tree(tmp_path / "parts", domains=("test", "train", "val"))
    with pytest.raises(DataError, match="has the folders test, train, val, parts of a split that would be trained on"):
        load("folder", root=tmp_path / "parts")
    (tmp_path / "parts" / "val").rename(tmp_path / "parts" / "street")
    assert load("folder", root=tmp_path / "parts").domains == ["street", "test", "train"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "The 'size' of folder is 0: give at least 1"),
        ({"test": 1.0}, "The 'test' of folder is 1.0: give a number from 0, below 1"),
        ({"test": 0.5, "validation": 0.5}, "leave nothing to train on"),
        ({"root": None}, "give root=PATH"),
        ({"group": "(north\\d+)_"}, r"16 of 16 files, '.*' among them, have no group by group='\(north"),
        ({"group": "(x*)"}, "have no group"),
        ({"group": "(0|(1))"}, "is no regular expression with one pair of brackets: put one around"),
        ({"group": "north"}, "one pair of brackets"),
        ({"group": "(north"}, "is no regular expression"),
        ({"group": 3}, "The 'group' of folder is 3, which is not text"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        load("folder", **{"root": make_tree(tmp_path), **options})  # type: ignore[arg-type]


# -- patients -------------------------------------------------------------------------------------------------
def test_no_patient_is_in_two_splits_also_across_classes(tmp_path: Path) -> None:
    for site in ("north", "south"):
        for number in range(24):
            for n in range(1 + number % 4):
                label = ("cat", "dog")[(number + n * (number % 3 == 0)) % 2]
                image(tmp_path / site / label / f"{site}{number:02d}_{n}.png", (number, n, 0))
    federation = load("folder", root=tmp_path, size=4, group=r"(\D+\d+)_")
    for client in federation.clients:
        parts = [set(federation.images[part, 0, 0, 0].tolist()) for part in client.splits]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts)) == 24
        # 60 images, of which 15 and 9 are asked for; both classes are everywhere.
        assert [len(part) for part in client.splits] == pytest.approx([36, 9, 15], abs=1)
        assert all(set(federation.labels[part].tolist()) == {0, 1} for part in client.splits)
    for text in (
        f"folder(root={tmp_path}, size=4, group=(\\D+\\d+)_)",
        f"folder(root={tmp_path}, group='(\\D+\\d+)_')",
    ):
        assert load_spec(text)["north"].test.equal(federation["north"].test)
    other = load("folder", root=tmp_path, size=4, group=r"(\D+\d+)_", split_seed=1)
    assert not other["north"].test.equal(federation["north"].test)


def test_lists_that_divide_a_patient_are_refused_and_validation_is_drawn_by_patients(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art",))
    every = "".join(f"art/{label}/{n:03d}.png\n" for label in ("cat", "dog") for n in range(1, 8))
    lists(root, train=every, test="art/cat/000.png\nart/dog/000.png\n")
    federation = load("folder", root=root, group=r"(\d+)\.png", validation=0.3)
    kept, held, _ = (set(federation.images[part, 2, 0, 0].tolist()) for part in federation["art"].splits)
    assert held
    assert not held & kept
    lists(root, train=every + "art/dog/000.png\n", test="art/cat/000.png\n")
    with pytest.raises(DataError, match="The group '000' of 'art' is for train and for test"):
        load("folder", root=root, group=r"(\d+)\.png")


def test_sixteen_bit_images_become_rgb(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art",))
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(root / "art" / "cat" / "902.png")
    assert load("folder", root=root, size=4).images[8, :, 0, 0].tolist() == [128] * 3
