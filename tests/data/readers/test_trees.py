"""PACS, VLCS, Office-Caltech-10 and DomainNet, on tiny trees laid out as theirs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from fedkeel.data import DATASETS, Dataset, load
from fedkeel.data.check import check
from fedkeel.data.readers.domainnet import TEN, DomainNet
from fedkeel.data.readers.office_caltech_10 import OfficeCaltech10
from fedkeel.data.readers.pacs import PACS
from fedkeel.data.readers.vlcs import VLCS
from fedkeel.errors import DataError, FedkeelError
from tests.data.made_up import image, tree


def colours(source: Dataset, domain: str, use: str) -> list[tuple[int, ...]]:
    """What `made_up.tree` says about the images of a split: (domain, class, number)."""
    positions = getattr(source.domains[domain], use)
    return [(r // 20, g // 10, n) for r, g, n in source.images[positions][:, :, 0, 0].tolist()]


# -- PACS -----------------------------------------------------------------------------------------------------
def kfold(root: Path, folder: str = ".", domains: tuple[str, ...] = PACS.domains) -> None:
    """The authors' lists over five images of each class: 4 to train, 1 for cross-validation, and all for testing."""
    (root / folder).mkdir(exist_ok=True)
    for domain in domains:
        lines = {
            n: [f"{domain}/{label}/{n:03d}.png {c + 1}" for c, label in enumerate(PACS.class_names)] for n in range(5)
        }
        train = [line for n in (3, 1, 2, 0) for line in lines[n]]
        (root / folder / f"{domain}_train_kfold.txt").write_text("\n".join(train) + "\n")
        (root / folder / f"{domain}_crossval_kfold.txt").write_text("\n".join(lines[4]) + "\n")
        (root / folder / f"{domain}_test_kfold.txt").write_text("\n".join([*train, *lines[4]]) + "\n")


def test_pacs_has_its_domains_and_labels(tmp_path: Path) -> None:
    source = DATASETS.build("pacs", root=tree(tmp_path, PACS.domains, PACS.class_names, 10), size=4)
    assert list(source.domains) == ["art_painting", "cartoon", "photo", "sketch"]
    assert source.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    for d, domain in enumerate(PACS.domains):
        split = source.domains[domain]
        assert [len(part) for part in (split.train, split.validation, split.test)] == [49, 7, 14]
        for use in ("train", "validation", "test"):
            assert {c for c, _, _ in colours(source, domain, use)} == {d}
            classes = [c for _, c, _ in colours(source, domain, use)]
            assert classes == source.labels[getattr(split, use)].tolist()


@pytest.mark.parametrize("folder", [".", "splits", "Train val splits and h5py files pre-read"])
def test_pacs_uses_its_authors_lists(tmp_path: Path, folder: str) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names)
    kfold(root, folder)
    source = DATASETS.build("pacs", root=root, size=4)
    assert [n for _, _, n in colours(source, "photo", "train")] == [n for n in (3, 1, 2, 0) for _ in range(7)]
    assert [(c, n) for _, c, n in colours(source, "photo", "validation")] == [(c, 4) for c in range(7)]
    assert len(source.domains["photo"].test) == 0
    # Left out, the domain is tested on all of its images, as the authors' test list says.
    assert len(load("pacs", root=root, size=4, unseen="photo")["photo"].test) == 35
    tested = DATASETS.build("pacs", root=root, size=4, crossval="test", validation=0)
    assert [(c, n) for _, c, n in colours(tested, "photo", "test")] == [(c, 4) for c in range(7)]
    shares = DATASETS.build("pacs", root=root, size=4, crossval="unused", validation=0.2, test=0.4).domains["photo"]
    assert [len(part) for part in (shares.train, shares.validation, shares.test)] == [14, 7, 14]


@pytest.mark.parametrize(
    ("images", "lists"), [("kfold", "Train val splits and h5py files pre-read"), ("images", "splits")]
)
def test_pacs_lies_beside_its_lists_as_downloaded(tmp_path: Path, images: str, lists: str) -> None:
    tree(tmp_path / images, PACS.domains, PACS.class_names)
    kfold(tmp_path, lists)
    assert len(DATASETS.build("pacs", root=tmp_path, size=4).domains["sketch"].train) == 28


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("photo/dog/999.png 1", "Line 1 of .*photo_train_kfold.txt', 'photo/dog/999.png 1', is no image"),
        ("photo/dog/004.png 1", "is already in the train list"),
    ],
)
def test_pacs_lists_that_contradict_the_folders_are_refused(tmp_path: Path, line: str, message: str) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names)
    kfold(root)
    (root / "photo_train_kfold.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        check("pacs", root)


def test_pacs_needs_both_lists(tmp_path: Path) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names)
    kfold(root)
    (root / "cartoon_crossval_kfold.txt").unlink()
    with pytest.raises(DataError, match=r"cartoon_crossval_kfold.txt' is missing"):
        DATASETS.build("pacs", root=root, size=4)


def test_fedcoda_splits_pacs_80_to_20_whatever_lists_there_are(tmp_path: Path) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names, 10)
    text = "clients(photo=3, art_painting=2, cartoon=1, sketch=4)"
    federation = load("pacs", root=root, size=4, subset="fedcoda", unseen="sketch", partition=text)
    assert [client.name for client in federation.clients] == [
        "art_painting-0", "art_painting-1", "cartoon", "photo-0", "photo-1", "photo-2",
    ]  # fmt: skip
    assert sum(client.samples for client in federation.clients if client.domain == "photo") == 56
    assert len(federation["cartoon"].test) == 14
    assert len(federation["sketch"].test) == 70


def test_greg_takes_pacs_with_the_transforms_of_fedbn(tmp_path: Path) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names, (10, 12, 8, 20))
    source = DATASETS.build("pacs", root=root, size=4, subset="greg")
    # photo is the smallest: 56 images, of which ceil(16.8) are tested and 39 are left.
    sizes = {name: (len(s.train), len(s.validation), len(s.test)) for name, s in source.domains.items()}
    assert sizes == {
        "art_painting": (19, 7, 21), "cartoon": (19, 7, 26), "photo": (19, 7, 17), "sketch": (19, 7, 42),
    }  # fmt: skip
    assert source.train_transform == "flip+rotation(degrees=30)"
    assert source.test_transform == ""
    assert len(source.images) == sum(sum(own) for own in sizes.values())  # what nobody uses is not stored


def test_what_is_missing_in_a_tree_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names)
    image(root / "photo" / "cat" / "1.png")
    image(root / "poster" / "dog" / "1.png")
    for file in ("dog/a.heic", "dog/b.svg", "guitar/c.heic", "guitar/more/d.png", "horse/Thumbs.db"):
        (root / "photo" / file).parent.mkdir(exist_ok=True)
        (root / "photo" / file).write_bytes(b"x")
    assert len(DATASETS.build("pacs", root=root, size=4).images) == 140
    assert "photo/cat' is no class of pacs and is not used" in caplog.text
    assert "poster' is no domain of pacs and is not used" in caplog.text
    told = f"4 files of '{root / 'photo'}' are not read: 2 .heic, 1 .svg, 1 .png not right in a class's folder ("
    assert told in caplog.text
    for file in (root / "sketch" / "house").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"The class 'house' of pacs has no images in '.*sketch'"):
        check("pacs", root)
    shutil.rmtree(root / "cartoon")
    with pytest.raises(DataError, match="The domain 'cartoon' of pacs is missing in"):
        check("pacs", root)


def test_a_tree_of_another_data_set_is_told_apart(tmp_path: Path) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names, 1)
    with pytest.raises(
        DataError, match=r"The domain 'amazon' of office-caltech-10 is missing in .*, which needs the folders amazon, "
    ):
        DATASETS.build("office-caltech-10", root=root)
    with pytest.raises(DataError, match=r"is not a folder: give the root of pacs"):
        DATASETS.build("pacs", root=root / "photo" / "dog" / "000.png")
    with pytest.raises(FedkeelError, match="The 'size' of pacs is 0"):
        DATASETS.build("pacs", root=root, size=0)
    with pytest.raises(FedkeelError, match="The 'crossval' of pacs is 'tests'"):
        DATASETS.build("pacs", root=root, crossval="tests")
    with pytest.raises(FedkeelError, match=r"The 'subset' of pacs is 'fedcod': did you mean 'fedcoda'\?"):
        DATASETS.build("pacs", root=root, subset="fedcod")


def test_a_broken_image_and_a_link_to_nowhere_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names, 10)
    broken, link = root / "photo" / "dog" / "002.png", root / "photo" / "dog" / "link.png"
    broken.write_bytes(broken.read_bytes()[:40])
    link.symlink_to(tmp_path / "nowhere.png")
    source = DATASETS.build("pacs", root=root, size=4)
    for file in (broken, link):
        assert f"The image '{file}' of 'pacs' cannot be decoded and is left out" in caplog.text
    seen = [colour for use in ("train", "validation", "test") for colour in colours(source, "photo", use)]
    assert sorted(seen) == sorted({(2, c, n) for c in range(7) for n in range(10)} - {(2, 0, 2)})
    link.unlink()
    link.symlink_to(root / "photo" / "dog" / "000.png")
    assert len(DATASETS.build("pacs", root=root, size=4).domains["photo"].all()) == 70


# -- VLCS -----------------------------------------------------------------------------------------------------
def test_vlcs_in_the_layout_of_domainbed(tmp_path: Path) -> None:
    source = DATASETS.build("vlcs", root=tree(tmp_path, VLCS.domains, VLCS.class_names, 10, "jpg"), size=4)
    assert list(source.domains) == ["Caltech101", "LabelMe", "SUN09", "VOC2007"]
    assert [len(part) for part in (source.domains["SUN09"].train, source.domains["SUN09"].test)] == [35, 10]


def test_vlcs_with_split_folders_keeps_that_split(tmp_path: Path) -> None:
    folders = ("CALTECH", "LABELME", "PASCAL", "SUN")
    for d, domain in enumerate(folders):
        for u, (use, count) in enumerate((("train", 3), ("crossval", 1), ("test", 2))):
            for c in range(5):
                for n in range(count):
                    image(tmp_path / domain / use / str(c) / f"{n}.png", (20 * d, 10 * c, 10 * u + n))
    source = DATASETS.build("vlcs", root=tmp_path, size=4)
    assert source.classes == ("bird", "car", "chair", "dog", "person")
    assert {d for d, _, _ in colours(source, "VOC2007", "train")} == {2}
    assert {d for d, _, _ in colours(source, "SUN09", "train")} == {3}
    assert [n for _, _, n in colours(source, "SUN09", "validation")] == [10] * 5
    assert [(c, n) for _, c, n in colours(source, "SUN09", "test")] == [(c, 20 + n) for c in range(5) for n in range(2)]
    assert len(source.domains["SUN09"].train) == 15
    # GReg cuts anew: 30 images of each domain, 9 to test on, 21 left, of which 6 and 6.
    split = DATASETS.build("vlcs", root=tmp_path, size=4, subset="greg").domains["LabelMe"]
    assert (len(split.train), len(split.validation), len(split.test)) == (6, 6, 9)
    shutil.rmtree(tmp_path / "SUN" / "test")
    with pytest.raises(DataError, match=r"SUN/test' of vlcs is missing"):
        DATASETS.build("vlcs", root=tmp_path, size=4)


# -- Office-Caltech-10 ----------------------------------------------------------------------------------------
def test_fedbn_takes_the_start_and_the_end_of_its_lists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tree(tmp_path, OfficeCaltech10.domains, OfficeCaltech10.class_names, 3)
    with caplog.at_level(logging.WARNING, "fedkeel"):
        drawn = DATASETS.build("office-caltech-10", root=root, size=4, subset="fedbn")
    assert "subsets of the published sizes are drawn by split_seed" in caplog.text
    assert [len(split.train) for split in drawn.domains.values()] == [12] * 4
    (root / "splits").mkdir()
    numbers = {}
    for d, (domain, listed) in enumerate((("amazon", 15), ("caltech", 12), ("dslr", 10), ("webcam", 18))):
        names = [(c, n) for n in range(3) for c in (7, 3, 0, 1, 2, 4, 5, 6, 8, 9)]
        lines = [f"{domain}/{OfficeCaltech10.class_names[c]}/{n:03d}.png" for c, n in names]
        (root / "splits" / f"{domain}_train.txt").write_text("\n".join(lines[:listed]))
        (root / "splits" / f"{domain}_test.txt").write_text("\n".join(lines[listed:]))
        numbers[domain] = [(d, c, n) for c, n in names]
    source = DATASETS.build("office-caltech-10", root=root, size=4, subset="fedbn")
    for domain, listed in (("amazon", 15), ("caltech", 12), ("dslr", 10), ("webcam", 18)):
        # The smallest list has 10 images: the first 5 and the last 4 of each.
        assert colours(source, domain, "train") == numbers[domain][:5]
        assert colours(source, domain, "validation") == numbers[domain][listed - 4 : listed]
        assert colours(source, domain, "test") == numbers[domain][listed:]


# -- DomainNet ------------------------------------------------------------------------------------------------
def domainnet_tree(root: Path) -> Path:
    """FedBN's ten classes with two images each in every domain, and two others with more."""
    tree(root, DomainNet.domains, TEN, 2, "jpg")
    for domain in DomainNet.domains:
        for label, count in (("axe", 4), ("yoga", 3 if domain != "real" else 9)):
            for n in range(count):
                image(root / domain / label / f"{n}.jpg")
    return root


def test_domainnet_reads_the_classes_that_are_asked_for(tmp_path: Path) -> None:
    root = domainnet_tree(tmp_path)
    ten = DATASETS.build("domainnet", root=root, size=4)
    assert (ten.classes, len(ten.images)) == (TEN, 120)
    assert list(ten.domains) == ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]
    # axe has 24 images, yoga 24 too; then all have 12, and the alphabet decides.
    assert DATASETS.build("domainnet", root=root, size=4, classes="top-3").classes == ("axe", "bird", "yoga")
    assert len(DATASETS.build("domainnet", root=root, size=4, classes="all").classes) == 12
    assert DATASETS.build("domainnet", root=root, size=4, classes=["yoga", "axe"]).classes == ("yoga", "axe")
    with pytest.raises(DataError, match=r"DomainNet has no class 'zebr': did you mean 'zebra'\?"):
        DATASETS.build("domainnet", root=root, classes="zebr")
    with pytest.raises(DataError, match="there are 12 classes"):
        DATASETS.build("domainnet", root=root, classes="top-100")


def test_domainnet_uses_its_authors_lists_for_the_classes_that_are_read(tmp_path: Path) -> None:
    root = domainnet_tree(tmp_path)
    for domain in DomainNet.domains:
        train = [f"{domain}/{label}/000.jpg 7" for label in TEN] + [f"{domain}/axe/0.jpg 0"]
        (root / f"{domain}_train.txt").write_text("\n".join(train))
        (root / f"{domain}_test.txt").write_text(f"{domain}/zebra/001.jpg 9\n{domain}/yoga/0.jpg 344\n")
    split = DATASETS.build("domainnet", root=root, size=4, validation=0).domains["real"]
    assert (len(split.train), len(split.test)) == (10, 1)
    # FedBN did not split so: its own lists, in splits/, go first, and without them the subset is drawn.
    drawn = DATASETS.build("domainnet", root=root, size=4, subset="greg").domains["real"]
    assert (len(drawn.train), len(drawn.validation), len(drawn.test)) == (4, 1, 4)
    (root / "splits").mkdir()
    for domain in DomainNet.domains:
        lines = [f"{domain}/{label}/{n:03d}.jpg" for n in range(2) for label in TEN]
        (root / "splits" / f"{domain}_train.txt").write_text("\n".join(lines[:18]))
        (root / "splits" / f"{domain}_test.txt").write_text("\n".join(lines[18:]))
    listed = DATASETS.build("domainnet", root=root, size=4, subset="greg").domains["real"]
    assert (len(listed.train), len(listed.validation), len(listed.test)) == (5, 1, 2)
    # Lists that name other classes are the authors', wherever they lie.
    (root / "splits" / "real_train.txt").write_text("real/lion/0.jpg 3\nreal/bird/000.jpg 1\n")
    again = DATASETS.build("domainnet", root=root, size=4, subset="greg").domains["real"]
    assert (len(again.train), len(again.validation), len(again.test)) == (4, 1, 4)
    (root / "splits" / "real_train.txt").write_text("real/zebra/9.jpg 3\n")
    with pytest.raises(DataError, match=r"'real/zebra/9.jpg 3', is no image of the domain 'real'"):
        DATASETS.build("domainnet", root=root, size=4)


# -- what people's disks have -----------------------------------------------------------------------------------
def test_a_list_may_have_a_byte_order_mark_and_must_be_text(tmp_path: Path) -> None:
    root = tree(tmp_path, PACS.domains, PACS.class_names)
    kfold(root)
    plain = DATASETS.build("pacs", root=root, size=4)
    file = root / "photo_train_kfold.txt"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    marked = DATASETS.build("pacs", root=root, size=4)
    assert marked.domains["photo"].train.equal(plain.domains["photo"].train)
    file.write_bytes(b"photo/dog/\x81.png 1")
    with pytest.raises(DataError, match=r"photo_train_kfold.txt' is not text in UTF-8 or cp1252: download it, or save"):
        DATASETS.build("pacs", root=root, size=4)
