"""Camelyon17 and HAM10000: a table that says what each image is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedkeel.data import DATASETS
from fedkeel.errors import DataError
from tests.data.made_up import image

CENTRES = (60, 40, 50, 100, 120)


def write_wilds(root: Path, counts: tuple[int, ...] = CENTRES) -> list[list[object]]:
    """The layout of WILDS: a table with an index column, and a folder for each patient and node."""
    rows: list[list[object]] = []
    for centre, count in enumerate(counts):
        for n in range(count):
            patient = f"{20 * centre + n % 3:03d}"
            tumour = int(n % 4 == 0)
            rows.append([len(rows), patient, n % 2, 10 * n, 7 * n, tumour, centre, centre, 0])
            slide = f"patient_{patient}_node_{n % 2}"
            file = root / "patches" / slide / f"patch_{slide}_x_{10 * n}_y_{7 * n}.png"
            image(file, (40 * centre, 200 * tumour, n % 250), (96, 96))
    with (root / "metadata.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"])
        table.writerows(rows)
    return rows


def test_camelyon17_has_a_domain_for_each_hospital(tmp_path: Path) -> None:
    write_wilds(tmp_path / "camelyon17_v1.0")
    source = DATASETS.build("camelyon17", root=tmp_path, size=8)
    assert list(source.domains) == ["H1", "H2", "H3", "H4", "H5"]
    assert source.classes == ("normal", "tumor")
    for hospital, (name, split) in enumerate(source.domains.items()):
        members = split.all()
        assert len(members) == CENTRES[hospital], name
        assert set(source.images[members, 0, 0, 0].tolist()) == {40 * hospital}
        assert (source.images[members, 1, 0, 0] == 200 * source.labels[members]).all()
        assert len(split.test) == CENTRES[hospital] // 5
    assert DATASETS.build("camelyon17", root=tmp_path).images.shape[-1] == 96


def test_a_share_of_camelyon17_is_drawn_before_files_are_looked_for(tmp_path: Path) -> None:
    write_wilds(tmp_path)
    source = DATASETS.build("camelyon17", root=tmp_path, size=8, share=0.11)
    # ceil(6.6), ceil(4.4), ceil(5.5), ceil(11), ceil(13.2)
    assert [len(split.all()) for split in source.domains.values()] == [7, 5, 6, 11, 14]
    # Another seed draws other patches.
    other = DATASETS.build("camelyon17", root=tmp_path, size=8, share=0.11, split_seed=1)
    assert not source.images.equal(other.images)


def test_greg_takes_equally_many_of_each_hospital(tmp_path: Path) -> None:
    write_wilds(tmp_path)
    source = DATASETS.build("camelyon17", root=tmp_path, size=8, subset="greg", share=0.5)
    # Half of H2 is 20, of which 6 are tested and 14 left: 5 and 5.
    sizes = [(len(s.train), len(s.validation), len(s.test)) for s in source.domains.values()]
    assert sizes == [(5, 5, 9), (5, 5, 6), (5, 5, 8), (5, 5, 15), (5, 5, 18)]
    assert source.train_transform == "flip+rotation(degrees=30)"


def test_what_is_wrong_with_camelyon17_is_named(tmp_path: Path) -> None:
    write_wilds(tmp_path, (6, 6, 6, 6, 6))
    lost = next((tmp_path / "patches").glob("patient_04*/*.png"))
    lost.unlink()
    with pytest.raises(DataError, match=f"{lost.name}' is missing: 'fedkeel data list camelyon17'"):
        DATASETS.build("camelyon17", root=tmp_path)
    table = tmp_path / "metadata.csv"
    lines = table.read_text().splitlines()
    for changed, message in (
        (lines[0].replace("center", "centre"), "lacks 'center'"),
        ("\n".join([lines[0], lines[1].replace(",0,0,0", ",7,7,0")]), "Row 1 of .* has the center '7'"),
        ("\n".join(lines[:7]), "The domain 'H2' of 'camelyon17' has no images"),
    ):
        table.write_text(changed)
        with pytest.raises(DataError, match=message):
            DATASETS.build("camelyon17", root=tmp_path)
    table.unlink()
    with pytest.raises(DataError, match=r"metadata.csv' is missing"):
        DATASETS.build("camelyon17", root=tmp_path)


SOURCES = ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
KINDS = ("nv", "mel", "bkl", "bcc", "akiec", "vasc", "df")


def write_ham(root: Path, columns: bool = True, separator: str = ",") -> Path:
    """Three images of each of five lesions of each kind from each source."""
    lines = [separator.join(["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization", "dataset"])]
    number = 0
    for s, source in enumerate(SOURCES):
        for k, kind in enumerate(KINDS):
            for lesion in range(5):
                for _ in range(3):
                    name = f"ISIC_{number:07d}"
                    part = root / f"HAM10000_images_part_{number % 2 + 1}"
                    image(part / f"{name}.jpg", (50 * s, 30 * k, 40 * lesion), (6, 4))
                    fields = [f"HAM_{s}{k}{lesion}", name, kind, "histo", "50.0", "male", "back", source]
                    lines.append(separator.join(fields))
                    number += 1
    if not columns:
        lines = [line.rpartition(separator)[0] for line in lines]
    (root / ("HAM10000_metadata.csv" if separator == "," else "HAM10000_metadata.tab")).write_text("\n".join(lines))
    return root


@pytest.mark.parametrize("separator", [",", "\t"])
def test_ham10000_keeps_the_images_of_a_lesion_together(tmp_path: Path, separator: str) -> None:
    source = DATASETS.build("ham10000", root=write_ham(tmp_path, separator=separator), size=4)
    assert list(source.domains) == ["rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias"]
    assert source.classes == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    lesions = {}
    for use in ("train", "validation", "test"):
        colours = source.images[getattr(source.domains["rosendahl"], use), :, 0, 0]
        assert ((colours[:, 0].int() - 100).abs() < 8).all()
        lesions[use] = {(round(k / 30), round(n / 40)) for _, k, n in colours.tolist()}
    # One of the five lesions of each kind is tested, and 10 % of them, rounded, validated.
    assert [len(lesions[use]) for use in ("train", "validation", "test")] == [21, 7, 7]
    assert not lesions["train"] & lesions["test"]
    assert not lesions["validation"] & lesions["test"]
    split = DATASETS.build("ham10000", root=tmp_path, size=4, by_lesion=False).domains["rosendahl"]
    assert len(split.test) == 21


def test_the_labels_of_ham10000_are_those_of_its_table(tmp_path: Path) -> None:
    source = DATASETS.build("ham10000", root=write_ham(tmp_path), size=4)
    kinds = [KINDS[round(green / 30)] for green in source.images[:, 1, 0, 0].tolist()]
    assert [source.classes[label] for label in source.labels.tolist()] == kinds


def test_what_is_wrong_with_ham10000_is_named(tmp_path: Path) -> None:
    root = write_ham(tmp_path, columns=False)
    with pytest.raises(DataError, match="lacks 'dataset': get the authors' file"):
        DATASETS.build("ham10000", root=root)
    write_ham(root)
    (root / "HAM10000_images_part_2" / "ISIC_0000001.jpg").unlink()
    with pytest.raises(DataError, match=r"Row 2 of .* has the image_id 'ISIC_0000001', which is none of the images"):
        DATASETS.build("ham10000", root=root)
    image(root / "HAM10000_images_part_2" / "ISIC_0000001.jpg")
    table = root / "HAM10000_metadata.csv"
    text = table.read_text()
    table.write_text(text.replace("rosendahl", "rosendal", 1))
    with pytest.raises(DataError, match="has the dataset 'rosendal', which is none of rosendahl, vidir_modern"):
        DATASETS.build("ham10000", root=root)
    table.write_text(text.replace(",nv,", ",nx,", 1))
    with pytest.raises(DataError, match=r"Row 1 of .* has the dx 'nx'"):
        DATASETS.build("ham10000", root=root)
    table.write_text(text.rstrip().rpartition(",")[0])
    with pytest.raises(DataError, match=r"Row 420 of .*HAM10000_metadata.csv' ends too early: download it again"):
        DATASETS.build("ham10000", root=root)
    table.write_text("")
    with pytest.raises(DataError, match=r"has the columns \(none\), and lacks 'lesion_id'"):
        DATASETS.build("ham10000", root=root)
    table.unlink()
    with pytest.raises(DataError, match="HAM10000_metadata' is missing"):
        DATASETS.build("ham10000", root=root)
