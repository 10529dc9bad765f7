"""Trees of images, on small ones made up here; the real ones where FEDKEEL_DATA has them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkeel.data import load, load_spec
from fedkeel.data.check import check
from fedkeel.errors import DataError, FedkeelError


def colour_of(domain: int, label: int, number: int) -> tuple[int, int, int]:
    return 40 * domain, 50 * label, number


def make_tree(root: Path, images: int = 8, domains: tuple[str, ...] = ("art", "photo"), suffix: str = "png") -> Path:
    for d, domain in enumerate(domains):
        for c, label in enumerate(("cat", "dog")):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for n in range(images):
                Image.new("RGB", (6, 4), colour_of(d, c, n)).save(folder / f"{n:03d}.{suffix}")
    return root


def test_a_tree_is_read_with_its_domains_classes_and_pixels(tmp_path: Path) -> None:
    federation = load("folder", root=make_tree(tmp_path), size=5)
    assert federation.images.shape == (32, 3, 5, 5)
    assert federation.classes == ("cat", "dog")
    assert federation.domains == ["art", "photo"]
    for d, client in enumerate(federation.clients):
        assert [len(part) for part in (client.train, client.validation, client.test)] == [10, 2, 4]
        for index in torch.cat([client.train, client.validation, client.test]).tolist():
            red, green, _ = federation.images[index, :, 2, 2].tolist()
            assert (red, green) == colour_of(d, int(federation.labels[index]), 0)[:2]


def test_every_image_is_known_by_its_path(tmp_path: Path) -> None:
    (make_tree(tmp_path / "tree", images=60) / "art" / "cat" / "007.png").write_bytes(b"broken")
    federation = load("folder", root=tmp_path / "tree", size=4)
    assert len(federation.paths) == len(federation.images) == 240
    for index in torch.cat([part for client in federation for part in client.splits]).tolist():
        path, image, label = federation.paths[index], federation.images[index], int(federation.labels[index])
        domain, name, number = Path(path).parts
        assert name == federation.classes[label]
        assert image[:, 0, 0].tolist() == list(colour_of(["art", "photo"].index(domain), label, int(number[:3])))


def test_the_split_depends_on_its_own_seed_only(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    first, run, split = (
        load("folder", root=root, **options)["art"].test for options in ({}, {"seed": 9}, {"split_seed": 9})
    )
    assert first.equal(run)
    assert not first.equal(split)


def test_the_text_form_reads_the_same(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    assert load_spec(f"folder(root={root}, size=8)").images.equal(load_spec("folder(size=8)", root=root).images)


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "bmp", "webp", "tif", "TIFF", "gif"])
def test_every_image_format_is_read(tmp_path: Path, suffix: str) -> None:
    assert len(load("folder", root=make_tree(tmp_path, suffix=suffix)).images) == 32


def test_grey_palette_and_sixteen_bit_images_become_rgb(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art",))
    Image.new("L", (4, 4), 77).save(root / "art" / "cat" / "900.png")
    Image.new("RGBA", (4, 4), (1, 2, 3, 255)).save(root / "art" / "cat" / "901.png")
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(root / "art" / "cat" / "902.png")
    images = load("folder", root=root, size=4).images
    assert images[8:11, :, 0, 0].tolist() == [[77, 77, 77], [1, 2, 3], [128, 128, 128]]


def test_hidden_folders_and_files_are_not_data(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    (root / ".git" / "objects").mkdir(parents=True)
    (root / "art" / ".thumbs").mkdir()
    (root / "art" / "cat" / "._000.png").write_bytes(b"x")
    (root / "art" / "cat" / "notes.txt").write_text("x")
    (root / "__MACOSX" / "art" / "cat").mkdir(parents=True)
    (root / "__MACOSX" / "art" / "cat" / "._000.png").write_bytes(b"x")
    assert len(load("folder", root=root).images) == 32


def test_a_class_that_a_site_lacks_can_be_declared(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    federation = load_spec(f"folder(root={root}, classes=[bird, cat, dog])")
    assert federation.classes == ("bird", "cat", "dog")
    assert sorted(set(federation.labels.tolist())) == [1, 2]
    with pytest.raises(DataError, match="class folder 'dog' of 'folder' is not in classes"):
        load("folder", root=root, classes=["cat", "bird"])


def test_lists_decide_the_split(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art",))
    (root / "splits").mkdir()
    (root / "splits" / "art_train.txt").write_text("art/dog/003.png 1\nart/cat/000.png 0\n\nart/cat/007.png\n")
    (root / "splits" / "art_test.txt").write_text("art/dog/001.png\n")
    federation = load("folder", root=root, validation=0)
    client = federation["art"]
    # Only the listed images are stored, in the order of the tree; cats come before dogs.
    assert federation.images[client.train, 1:, 0, 0].tolist() == [[0, 0], [0, 7], [50, 3]]
    assert federation.images[client.test, 1:, 0, 0].tolist() == [[50, 1]]
    assert len(federation.images) == 4
    assert len(client.validation) == 0


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("art/cat/999.png 0", "art/cat/001.png", "Line 1 of .*art_train.txt', 'art/cat/999.png 0', is no image"),
        ("art/cat/001.png", "art/cat/001.png", "is already in the train list"),
        ("art/cat/001.png", None, "art_test.txt' is missing"),
    ],
)
def test_lists_that_contradict_the_tree_are_refused(tmp_path: Path, train: str, test: str | None, message: str) -> None:
    root = make_tree(tmp_path, domains=("art",))
    (root / "splits").mkdir()
    (root / "splits" / "art_train.txt").write_text(train)
    if test is not None:
        (root / "splits" / "art_test.txt").write_text(test)
    with pytest.raises(DataError, match=message):
        load("folder", root=root)


def test_a_broken_image_is_named_counted_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path, images=50)
    (root / "art" / "cat" / "004.png").write_bytes(b"not an image")
    for _ in range(2):  # decoded, then cached
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedkeel"):
            federation = load("folder", root=root, size=4)
        assert "art/cat/004.png' of 'folder' cannot be decoded" in caplog.text
        assert "1 of the 200 images of 'folder' are left out" in caplog.text
        held = torch.cat([p for c in federation.clients for p in (c.train, c.validation, c.test)]).sort().values
        assert held.tolist() == [n for n in range(200) if n != 4]
        # What follows the gap still has its own label and pixels.
        assert federation.images[5, :, 0, 0].tolist() == list(colour_of(0, 0, 5))


def test_more_than_a_hundredth_of_broken_images_is_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path, images=50)
    for n in range(3):
        (root / "art" / "cat" / f"{n:03d}.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match="3 of the 200 images of 'folder' cannot be decoded, more than 1 %"):
        load("folder", root=root)


def test_a_tree_without_domains_is_told_the_layout(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    with pytest.raises(DataError, match=r"has images right in it, but the layout must be root/<domain>/<class>"):
        load("folder", root=root / "art")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"The domain '.*empty' of 'folder' has no images"):
        load("folder", root=root)
    with pytest.raises(DataError, match="There are no images in"):
        load("folder", root=tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "The 'size' of folder is 0: give at least 1"),
        ({"test": 1.0}, "The 'test' of folder is 1.0: give a number from 0, below 1"),
        ({"test": 0.5, "validation": 0.5}, "leave nothing to train on"),
        ({"root": "/nowhere/at/all"}, "does not exist"),
        ({"root": None}, "give root=PATH"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        load("folder", **{"root": make_tree(tmp_path), **options})  # type: ignore[arg-type]


def test_a_data_set_is_looked_for_in_fedkeel_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)
    with pytest.raises(DataError, match="set FEDKEEL_DATA"):
        load("pacs")
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    with pytest.raises(DataError, match="there is no 'pacs' or 'PACS' in it"):
        load("pacs")


def test_class_folders_that_differ_in_case_only_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path)
    (root / "art" / "dog").rename(root / "art" / "Dog")
    with caplog.at_level(logging.WARNING, "fedkeel"):
        assert load("folder", root=root).classes == ("Dog", "cat", "dog")
    assert "The class folders 'Dog' and 'dog' count as two classes: give them one name." in caplog.text


def test_empty_class_folders_and_single_images_are_told_in_a_sentence_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(tmp_path, domains=("art", "photo", "sketch"))
    for file in [*(root / "art" / "dog").iterdir(), *(root / "photo" / "cat").iterdir()]:
        file.unlink()
    for domain in ("art", "sketch"):
        for file in list((root / domain / "cat").iterdir())[1:]:
            file.unlink()
    empty = f"'{root / 'art' / 'dog'}', '{root / 'photo' / 'cat'}'"
    told = f"Class folders without images: {empty}; their domains have none of these classes."
    untested = "'folder' has domains without test samples: 'art'."
    single = "'folder' has classes with a single sample, which cannot be both trained on and tested: "
    load("folder", root=root)
    assert caplog.messages == [told, untested, f"{single}'art/cat', 'sketch/cat'."]
    caplog.clear()
    load("folder", root=root, unseen=["art", "sketch"])  # of those every image is tested
    assert caplog.messages == [told, "'folder' has classes that are tested and that nobody trains on: 'cat'."]


def test_domains_without_test_images_are_told_unless_another_is_held_out_for_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(tmp_path, domains=("art", "photo", "sketch"))
    load("folder", root=root, test=0, validation=0, unseen="sketch")
    assert caplog.messages == []
    (root / "splits").mkdir()
    for part in ("train", "test"):
        (root / "splits" / f"photo_{part}.txt").write_text(
            f"photo/cat/00{len(part)}.png\nphoto/dog/00{len(part)}.png\n"
        )
    load("folder", root=root, test=0, validation=0)
    assert "'folder' has domains without test samples: 'art', 'sketch'." in caplog.messages


def test_lists_written_on_windows_are_read(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art",))
    (root / "splits").mkdir()
    (root / "splits" / "art_train.txt").write_bytes(b"art\\dog\\003.png 1\r\nart\\cat\\000.png\r\n")
    (root / "splits" / "art_test.txt").write_text("art/dog/001.png\nart/cat/007.png\n")
    assert [len(part) for part in load("folder", root=root)["art"].splits] == [2, 0, 2]


def test_a_list_of_no_domain_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path)
    (root / "splits").mkdir()
    for name in ("Art_train.txt", "notes.txt"):
        (root / "splits" / name).write_text("art/cat/000.png\n")
    with caplog.at_level(logging.WARNING, "fedkeel"):
        load("folder", root=root)
    strange = root / "splits" / "Art_train.txt"
    assert caplog.messages == [f"The list '{strange}' is of no domain and is not used: did you mean 'art_train.txt'?"]


def test_lists_for_some_domains_only_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path, domains=("art", "photo", "sketch"))
    (root / "splits").mkdir()
    for part, image in (("train", "000"), ("test", "001")):
        (root / "splits" / f"photo_{part}.txt").write_text(f"photo/cat/{image}.png\nphoto/dog/{image}.png\n")
    with caplog.at_level(logging.WARNING, "fedkeel"):
        load("folder", root=root)
    told = f"Some domains of '{root}' have lists in splits/, but not art and sketch: those are split at random."
    assert caplog.messages == ["12 images of 'photo' are in none of its lists and are not used.", told]


def test_parts_of_a_split_are_not_taken_for_domains(tmp_path: Path) -> None:
    make_tree(tmp_path, domains=("test", "train", "val"))
    with pytest.raises(DataError, match="has the folders test, train, val, parts of a split that would be trained on"):
        load("folder", root=tmp_path)
    (tmp_path / "val").rename(tmp_path / "street")
    assert load("folder", root=tmp_path).domains == ["street", "test", "train"]


def add(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"content")


def warnings_of(root: Path, caplog: pytest.LogCaptureFixture, **options: object) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedkeel"):
        load("folder", root=root, **options)
    return [record.getMessage() for record in caplog.records]


def test_files_that_are_not_read_are_named_and_counted_by_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(tmp_path)
    assert warnings_of(root, caplog) == []
    add(
        root,
        *(f"art/cat/{n}.heic" for n in range(3)),
        "art/dog/a.HEIF",
        "art/dog/b.nii",
        "art/dog/IM0001",
        "photo/x.svg",
    )
    add(root, "photo/cat/deep/er/1.png", "photo/cat/deep/2.gif", "labels.csv")
    told = [
        f"1 file of '{root}' is not read: 1 .csv ('labels.csv'); convert images among them to PNG.",
        "6 files of 'art' are not read: 3 .heic, 1 without an ending, 1 .heif, 1 .nii ('0.heic', '1.heic', '2.heic' "
        "and 3 others); convert images among them to PNG.",
        "3 files of 'photo' are not read: 1 .gif not right in a class's folder, 1 .png not right in a class's folder, "
        "1 .svg ('2.gif', '1.png', 'x.svg'); put images right into the folder of their class.",
    ]
    assert warnings_of(root, caplog) == told
    assert [(count.domain, count.use, count.found) for count in check("folder", root).counts][:3] == [
        ("art", "train", 10), ("art", "validation", 2), ("art", "test", 4),
    ]  # fmt: skip


def test_what_systems_leave_in_folders_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path)
    add(
        root,
        ".DS_Store",
        "art/Thumbs.db",
        "art/cat/desktop.ini",
        "art/cat/._0.tif",
        "art/cat/.x/1.tif",
        "art/__MACOSX/2.tif",
    )
    add(root, "art/cat/@eaDir/3.png")
    assert warnings_of(root, caplog) == []


def test_a_domain_of_nothing_but_other_formats_is_refused_by_their_names(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    add(root, *(f"scans/cat/{n}.nii" for n in range(4)))
    with pytest.raises(DataError, match=r"has no images \(4 files of 'scans' are not read: 4 .nii \('0.nii', "):
        load("folder", root=root)


def test_images_in_no_list_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_tree(tmp_path, domains=("art",))
    (root / "splits").mkdir()
    (root / "splits" / "art_train.txt").write_text("art/cat/000.png\nart/dog/000.png\n")
    (root / "splits" / "art_test.txt").write_text("art/cat/001.png\n")
    assert "13 images of 'art' are in none of its lists and are not used." in warnings_of(root, caplog)


def test_a_folder_called_like_an_image_is_none(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    (root / "art" / "cat" / "x.png").mkdir()
    assert len(load("folder", root=root).images) == 32


def test_a_site_without_test_images_is_read(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art", "photo"))
    for label in ("cat", "dog"):
        (root / "small" / label).mkdir(parents=True)
        Image.new("RGB", (6, 4)).save(root / "small" / label / "only.png")
    (root / "splits").mkdir()
    (root / "splits" / "photo_train.txt").write_text("photo/cat/000.png\nphoto/dog/000.png\n")
    (root / "splits" / "photo_test.txt").write_text("")
    federation = load("folder", root=root)
    assert {client.name: len(client.test) for client in federation.clients} == {"art": 4, "photo": 0, "small": 0}
    assert all(client.samples for client in federation.clients)


def patients(root: Path) -> Path:
    """Two sites; patients with one to four images, some of which are in both classes."""
    for site in ("north", "south"):
        for number in range(24):
            for image in range(1 + number % 4):
                label = ("cat", "dog")[(number + image * (number % 3 == 0)) % 2]
                file = root / site / label / f"{site}{number:02d}_{image}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (4, 4), (number, image, 0)).save(file)
    return root


def test_no_patient_is_in_two_splits_also_across_classes(tmp_path: Path) -> None:
    root = patients(tmp_path)
    federation = load("folder", root=root, size=4, group=r"(\D+\d+)_")
    for client in federation.clients:
        parts = [set(federation.images[part, 0, 0, 0].tolist()) for part in client.splits]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts)) == 24
        # 60 images, of which 15 and 9 are asked for; both classes are everywhere.
        sizes = [len(part) for part in client.splits]
        assert sizes == pytest.approx([36, 9, 15], abs=1)
        assert all(set(federation.labels[part].tolist()) == {0, 1} for part in client.splits)
    text = load_spec(f"folder(root={root}, size=4, group=(\\D+\\d+)_)")
    quoted = load_spec(f"folder(root={root}, size=4, group='(\\D+\\d+)_')")
    for same in (text, quoted):
        assert same["north"].test.equal(federation["north"].test)
    other = load("folder", root=root, size=4, group=r"(\D+\d+)_", split_seed=1)
    assert not other["north"].test.equal(federation["north"].test)


def test_a_patient_in_several_domains_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(patients(tmp_path), caplog, group=r"(\d+)_")
    assert told.startswith("24 groups are in several domains, '00' in north and south: each domain is split by itself")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("(north\\d+)_", r"60 of 60 files, '.*/south/.*' among them, have no group by group='\(north"),
        ("(north|(south))", "has 2 pairs of brackets: put one around what names the patient"),
        ("north", "has 0 pairs of brackets"),
        ("(north", "is no regular expression"),
        (r"(x*)", "have no group"),
        (3, "The 'group' of folder is 3, which is not text"),
    ],
)
def test_patterns_that_give_no_groups_are_refused(tmp_path: Path, group: str, message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        load("folder", root=patients(tmp_path), group=group)


def test_lists_that_divide_a_patient_are_refused_and_validation_is_drawn_by_patients(tmp_path: Path) -> None:
    root = make_tree(tmp_path, domains=("art",))
    (root / "splits").mkdir()
    train, test = root / "splits" / "art_train.txt", root / "splits" / "art_test.txt"
    test.write_text("art/cat/000.png\nart/dog/000.png\n")
    train.write_text("art/cat/001.png\nart/dog/000.png\n".replace("dog/000", "dog/001"))
    every = "".join(f"art/{label}/{n:03d}.png\n" for label in ("cat", "dog") for n in range(1, 8))
    train.write_text(every)
    federation = load("folder", root=root, group=r"(\d+)\.png", validation=0.3)
    held, kept = (set(federation.images[part, 2, 0, 0].tolist()) for part in federation["art"].splits[1::-1])
    assert (held, held & kept) != (set(), kept)
    assert not held & kept
    test.write_text("art/cat/000.png\n")
    train.write_text(every + "art/dog/000.png\n")
    with pytest.raises(DataError, match="The group '000' of 'art' is for train and for test"):
        load("folder", root=root, group=r"(\d+)\.png")
