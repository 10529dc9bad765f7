"""PACS, VLCS, Office-Caltech-10 and DomainNet, on tiny trees laid out as theirs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from fedkeel.data import DATASETS, Dataset, load
from fedkeel.data.readers.trees import PACS, VLCS, DomainNet, OfficeCaltech10
from fedkeel.errors import DataError, FedkeelError
from tests.data.made_up import image, tree

TEN = DomainNet.class_names


def colours(source: Dataset, domain: str, use: str) -> list[tuple[int, ...]]:
    """What `made_up.tree` says about the images of a split: (domain, class, number)."""
    positions = getattr(source.domains[domain], use)
    return [(r // 20, g // 10, n) for r, g, n in source.images[positions][:, :, 0, 0].tolist()]


# -- PACS -----------------------------------------------------------------------------------------------------
def kfold(root: Path, folder: str = ".") -> Path:
    """The authors' lists over five images of each class: 4 to train, 1 for cross-validation, and all for testing."""
    (root / folder).mkdir(exist_ok=True)
    for domain in PACS.sizes:
        lines = {
            n: [f"{domain}/{label}/{n:03d}.png {c + 1}" for c, label in enumerate(PACS.class_names)] for n in range(5)
        }
        train = [line for n in (3, 1, 2, 0) for line in lines[n]]
        for use, listed in (("train", train), ("crossval", lines[4]), ("test", [*train, *lines[4]])):
            (root / folder / f"{domain}_{use}_kfold.txt").write_text("\n".join(listed) + "\n")
    return root


def test_pacs_has_its_domains_and_labels(tmp_path: Path) -> None:
    source = DATASETS.build("pacs", root=tree(tmp_path, [*PACS.sizes], PACS.class_names, 10), size=4)
    assert list(source.domains) == ["art_painting", "cartoon", "photo", "sketch"]
    assert source.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    for d, (domain, split) in enumerate(source.domains.items()):
        assert [len(part) for part in split] == [49, 7, 14]
        for use in ("train", "validation", "test"):
            assert {c for c, _, _ in colours(source, domain, use)} == {d}
            classes = [c for _, c, _ in colours(source, domain, use)]
            assert classes == source.labels[getattr(split, use)].tolist()


@pytest.mark.parametrize("folder", [".", "splits", "Train val splits and h5py files pre-read"])
@pytest.mark.parametrize("inside", ["", "kfold"])
def test_pacs_uses_its_authors_lists(tmp_path: Path, folder: str, inside: str) -> None:
    tree(tmp_path / inside, [*PACS.sizes], PACS.class_names)
    root = kfold(tmp_path, folder)
    source = DATASETS.build("pacs", root=root, size=4)
    assert [n for _, _, n in colours(source, "photo", "train")] == [n for n in (3, 1, 2, 0) for _ in range(7)]
    assert [(c, n) for _, c, n in colours(source, "photo", "validation")] == [(c, 4) for c in range(7)]
    assert len(source.domains["photo"].test) == 0
    # Left out, the domain is tested on all of its images, as the authors' test list says.
    assert len(load("pacs", root=root, size=4, unseen="photo")["photo"].test) == 35
    tested = DATASETS.build("pacs", root=root, size=4, crossval="test", validation=0)
    assert [(c, n) for _, c, n in colours(tested, "photo", "test")] == [(c, 4) for c in range(7)]
    shares = DATASETS.build("pacs", root=root, size=4, crossval="unused", validation=0.2, test=0.4).domains["photo"]
    assert [len(part) for part in shares] == [14, 7, 14]


def test_fedcoda_splits_pacs_80_to_20_whatever_lists_there_are(tmp_path: Path) -> None:
    root = tree(tmp_path, [*PACS.sizes], PACS.class_names, 10)
    text = "clients(photo=3, art_painting=2, cartoon=1, sketch=4)"
    federation = load("pacs", root=root, size=4, subset="fedcoda", unseen="sketch", partition=text)
    assert [client.name for client in federation.clients] == [
        "art_painting-0", "art_painting-1", "cartoon", "photo-0", "photo-1", "photo-2",
    ]  # fmt: skip
    assert sum(client.samples for client in federation.clients if client.domain == "photo") == 56
    assert len(federation["cartoon"].test) == 14
    assert len(federation["sketch"].test) == 70


def test_greg_takes_pacs_with_the_transforms_of_fedbn(tmp_path: Path) -> None:
    root = tree(tmp_path, [*PACS.sizes], PACS.class_names, (10, 12, 8, 20))
    source = DATASETS.build("pacs", root=root, size=4, subset="greg")
    # photo is the smallest: 56 images, of which ceil(16.8) are tested and 39 are left.
    sizes = [tuple(map(len, split)) for split in source.domains.values()]
    assert sizes == [(19, 7, 21), (19, 7, 26), (19, 7, 17), (19, 7, 42)]
    assert (source.train_transform, source.test_transform) == ("flip+rotation(degrees=30)", "")
    assert len(source.images) == sum(map(sum, sizes))  # what nobody uses is not stored


# -- what is wrong --------------------------------------------------------------------------------------------
def test_what_is_not_read_of_a_tree_is_told_and_what_is_missing_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tree(tmp_path, [*PACS.sizes], PACS.class_names)
    for file in ("photo/cat/1.png", "poster/dog/1.png", "photo/dog/a.heic", "photo/guitar/more/d.png", "Thumbs.db"):
        image(root / "x.png").rename(root / "x")
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "x").rename(root / file)
    assert len(DATASETS.build("pacs", root=root, size=4).images) == 140
    (told,) = caplog.messages
    named = "'photo/cat/1.png', 'photo/dog/a.heic', 'photo/guitar/more/d.png' and 1 others"
    assert told.startswith(f"4 files of '{root}' are not read, {named}: put images right into their class's folder")
    for file in (root / "sketch" / "house").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"The class 'house' of pacs has no images in '.*sketch'"):
        load("pacs", root=root)
    shutil.rmtree(root / "cartoon")
    with pytest.raises(DataError, match="cartoon' is missing: 'fedkeel data list pacs' shows how pacs must look"):
        load("pacs", root=root)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": "a.png"}, "is not a folder: give the root of pacs"),
        ({"size": 0}, "The 'size' of pacs is 0"),
        ({"crossval": "tests"}, "The 'crossval' of pacs is 'tests'"),
        ({"subset": "fedcod"}, "The 'subset' of pacs is 'fedcod': did you mean 'fedcoda'"),
        ({"root": "nowhere"}, "The root '.*nowhere' of 'pacs' does not exist"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    image(tmp_path / "a.png")
    given = {**options, "root": tmp_path / str(options.get("root", "."))}
    with pytest.raises(FedkeelError, match=message):
        load("pacs", **given)  # type: ignore[arg-type]


def test_a_data_set_is_looked_for_in_fedkeel_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("", str(tmp_path)):
        monkeypatch.setenv("FEDKEEL_DATA", place)
        with pytest.raises(DataError, match=f"give root=PATH, or set FEDKEEL_DATA, which is '{place}', to a folder"):
            load("pacs")
    tree(tmp_path / "PACS", [*PACS.sizes], PACS.class_names, 2)
    assert len(load("pacs", size=4).images) == 56


# -- VLCS -----------------------------------------------------------------------------------------------------
def test_vlcs_in_the_layout_of_domainbed(tmp_path: Path) -> None:
    source = DATASETS.build("vlcs", root=tree(tmp_path, [*VLCS.sizes], VLCS.class_names, 10, "jpg"), size=4)
    assert list(source.domains) == ["Caltech101", "LabelMe", "SUN09", "VOC2007"]
    assert [len(part) for part in source.domains["SUN09"]] == [35, 5, 10]


def test_vlcs_with_split_folders_keeps_that_split(tmp_path: Path) -> None:
    for d, domain in enumerate(("CALTECH", "LABELME", "PASCAL", "SUN")):
        for u, (use, count) in enumerate((("train", 3), ("crossval", 1), ("test", 2))):
            for c in range(5):
                for n in range(count):
                    image(tmp_path / domain / use / str(c) / f"{n}.png", (20 * d, 10 * c, 10 * u + n))
    source = DATASETS.build("vlcs", root=tmp_path, size=4)
    assert source.classes == ("bird", "car", "chair", "dog", "person")
    assert {d for d, _, _ in colours(source, "VOC2007", "train")} == {2}
    assert [n for _, _, n in colours(source, "SUN09", "validation")] == [10] * 5
    assert [(c, n) for _, c, n in colours(source, "SUN09", "test")] == [(c, 20 + n) for c in range(5) for n in range(2)]
    assert len(source.domains["SUN09"].train) == 15
    # GReg cuts anew: 30 images of each domain, 9 to test on, 21 left, of which 6 and 6.
    split = DATASETS.build("vlcs", root=tmp_path, size=4, subset="greg").domains["LabelMe"]
    assert [len(part) for part in split] == [6, 6, 9]


# -- Office-Caltech-10 ----------------------------------------------------------------------------------------
def test_fedbn_takes_the_start_and_the_end_of_its_lists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tree(tmp_path, [*OfficeCaltech10.sizes], OfficeCaltech10.class_names, 3)
    with caplog.at_level(logging.WARNING, "fedkeel"):
        drawn = DATASETS.build("office-caltech-10", root=root, size=4, subset="fedbn")
    assert "has no lists of FedBN in 'splits': other images than FedBN's are drawn" in caplog.text
    assert [len(split.train) for split in drawn.domains.values()] == [12] * 4
    (root / "splits").mkdir()
    listed = {"amazon": 15, "caltech": 12, "dslr": 10, "webcam": 18}
    names = [(c, n) for n in range(3) for c in (7, 3, 0, 1, 2, 4, 5, 6, 8, 9)]
    for domain, count in listed.items():
        lines = [f"{domain}/{OfficeCaltech10.class_names[c]}/{n:03d}.png" for c, n in names]
        (root / "splits" / f"{domain}_train.txt").write_text("\n".join(lines[:count]))
        (root / "splits" / f"{domain}_test.txt").write_text("\n".join(lines[count:]))
    source = DATASETS.build("office-caltech-10", root=root, size=4, subset="fedbn")
    for d, (domain, count) in enumerate(listed.items()):
        # The smallest list has 10 images: the first 5 and the last 4 of each.
        own = [(d, c, n) for c, n in names]
        assert colours(source, domain, "train") == own[:5]
        assert colours(source, domain, "validation") == own[count - 4 : count]
        assert colours(source, domain, "test") == own[count:]


# -- DomainNet ------------------------------------------------------------------------------------------------
@pytest.fixture
def domainnet(tmp_path: Path) -> Path:
    """FedBN's ten classes with two images each in every domain, and two others with more."""
    tree(tmp_path, [*DomainNet.sizes], TEN, 2, "jpg")
    for domain in DomainNet.sizes:
        for label, count in (("axe", 4), ("yoga", 3 if domain != "real" else 9)):
            for n in range(count):
                image(tmp_path / domain / label / f"{n}.jpg")
    return tmp_path


def test_domainnet_reads_the_classes_that_are_asked_for(domainnet: Path) -> None:
    ten = DATASETS.build("domainnet", root=domainnet, size=4)
    assert (ten.classes, len(ten.images)) == (TEN, 120)
    # axe has 24 images, yoga 24 too; then all have 12, and the alphabet decides.
    for classes, wanted in (("top-3", ("axe", "bird", "yoga")), (["yoga", "axe"], ("yoga", "axe"))):
        assert DATASETS.build("domainnet", root=domainnet, size=4, classes=classes).classes == wanted
    assert len(DATASETS.build("domainnet", root=domainnet, size=4, classes="all").classes) == 12
    with pytest.raises(DataError, match=r"DomainNet has no class 'zebr': did you mean 'zebra'\?"):
        DATASETS.build("domainnet", root=domainnet, classes="zebr")


def test_domainnet_uses_its_authors_lists_for_the_classes_that_are_read(domainnet: Path) -> None:
    for domain in DomainNet.sizes:
        train = [f"{domain}/{label}/000.jpg 7" for label in TEN] + [f"{domain}/axe/0.jpg 0"]
        (domainnet / f"{domain}_train.txt").write_text("\n".join(train))
        (domainnet / f"{domain}_test.txt").write_text(f"{domain}/zebra/001.jpg 9\n{domain}/yoga/0.jpg 344\n")
    split = DATASETS.build("domainnet", root=domainnet, size=4, validation=0).domains["real"]
    assert (len(split.train), len(split.test)) == (10, 1)

    def subset() -> list[int]:
        return [*map(len, DATASETS.build("domainnet", root=domainnet, size=4, subset="greg").domains["real"])]

    # FedBN did not split so: its own lists, in splits/, go first, and without them the subset is drawn.
    assert subset() == [4, 1, 4]
    (domainnet / "splits").mkdir()
    for domain in DomainNet.sizes:
        lines = [f"{domain}/{label}/{n:03d}.jpg" for n in range(2) for label in TEN]
        (domainnet / "splits" / f"{domain}_train.txt").write_text("\n".join(lines[:18]))
        (domainnet / "splits" / f"{domain}_test.txt").write_text("\n".join(lines[18:]))
    assert subset() == [5, 1, 2]
    # Lists that name other classes are the authors', wherever they lie.
    (domainnet / "splits" / "real_train.txt").write_text("real/lion/0.jpg 3\nreal/bird/000.jpg 1\n")
    assert subset() == [4, 1, 4]
