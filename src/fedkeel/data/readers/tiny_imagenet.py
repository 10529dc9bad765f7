"""Tiny-ImageNet (Stanford CS231n): 200 classes of 64 px photographs.

The labels of its test images are not public: as everywhere, its validation images are the test set.
"""

from dataclasses import dataclass
from pathlib import Path

from fedkeel.data.dataset import Findings, Images, Manifest, image_files, split_domain
from fedkeel.data.formats.folders import class_images, images_in, visible_folders
from fedkeel.data.formats.lists import read_lines
from fedkeel.data.reader import Reader, published
from fedkeel.options import Count


@published
@dataclass(frozen=True)
class TinyImageNet(Reader):
    """Tiny-ImageNet: 100,000 + 10,000 images of 200 classes, one domain.

    `validation` is a share of the training set, none by default.
    """

    name = "tiny-imagenet"
    paper = "Le and Yang, CS231n, 2015; transforms of HBN"
    what = "200 classes of ImageNet at 64 px, one domain; tested on its validation images."
    home = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    licence = "as ImageNet: for non-commercial research"
    layout = (
        "tiny-imagenet-200/wnids.txt\n"
        "tiny-imagenet-200/train/<wnid>/images/*.JPEG\n"
        "tiny-imagenet-200/val/images/*.JPEG and val/val_annotations.txt"
    )
    folders = ("tiny-imagenet", "tiny-imagenet-200", "tiny_imagenet", "TinyImageNet")
    inside = ("tiny-imagenet-200",)
    sizes = {"tiny-imagenet": {"train": 100000, "test": 10000}}
    num_classes = 200  # whose names are in wnids.txt

    size: Count = 64

    def scan(self, root: Path, findings: Findings) -> Manifest:
        train, listed = root / "train", root / "wnids.txt"
        names = " ".join(read_lines(listed).values()).split() if listed.is_file() else []
        classes = tuple(sorted(names) if names else [path.name for path in visible_folders(train)])
        trained: list[Images] = []
        tested: list[Images] = []
        if train.is_dir():
            trained.append(class_images(self.name, train, classes, findings, below="images"))
        else:
            findings.missing(f"'{train}' is missing: tiny-imagenet has a folder train/<wnid>/images there.")
        with findings.part():
            tested.append(annotated(root / "val", classes, findings))
        return Manifest(self.name, root, classes, {self.name: split_domain(trained, tested)})


def annotated(folder: Path, classes: tuple[str, ...], findings: Findings) -> Images:
    """`val/images/*.JPEG`, whose classes are in the lines `file wnid x y w h` of `val/val_annotations.txt`."""
    listed = folder / "val_annotations.txt"
    files: list[Path] = []
    labels: list[int] = []
    if not listed.is_file():
        findings.missing(f"'{listed}' is missing: without it the validation images have no classes.")
        return image_files(files, labels)
    number = {wnid: label for label, wnid in enumerate(classes)}
    there = {file.name: file for file in images_in(folder / "images")}
    lost: list[str] = []
    for place, line in read_lines(listed).items():
        image, wnid, *_ = [*line.split(), ""]
        if wnid not in number:
            findings.missing(f"{place}, '{line}', names no class of the training images: get the authors' file.")
        elif image not in there:
            lost.append(image)
        else:
            files.append(there[image])
            labels.append(number[wnid])
    if lost:
        findings.missing(
            f"{len(lost)} of the images in '{listed}' are missing from '{folder / 'images'}', '{lost[0]}' among them: "
            "unpack all of the archive."
        )
    return image_files(files, labels)
