"""Tiny-ImageNet (Stanford CS231n): 200 classes of 64 px photographs.

The labels of its test images are not public: as everywhere, its validation images are the test set.
"""

from dataclasses import dataclass
from pathlib import Path

from fedkeel.data.dataset import Images, Manifest, image_files, split_domain
from fedkeel.data.formats.folders import class_images, images_in, visible_folders
from fedkeel.data.formats.lists import read_lines
from fedkeel.data.reader import Reader, published
from fedkeel.errors import DataError
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

    def scan(self, root: Path) -> Manifest:
        train, listed = root / "train", root / "wnids.txt"
        if not train.is_dir():
            raise DataError(f"'{train}' is missing: tiny-imagenet has a folder train/<wnid>/images there.")
        names = " ".join(read_lines(listed).values()).split() if listed.is_file() else []
        classes = tuple(sorted(names) if names else [path.name for path in visible_folders(train)])
        trained = class_images(self.name, train, classes, below="images")
        domain = split_domain([trained], [annotated(root / "val", classes)])
        return Manifest(self.name, root, classes, {self.name: domain})


def annotated(folder: Path, classes: tuple[str, ...]) -> Images:
    """`val/images/*.JPEG`, whose classes are in the lines `file wnid x y w h` of `val/val_annotations.txt`."""
    listed = folder / "val_annotations.txt"
    if not listed.is_file():
        raise DataError(f"'{listed}' is missing: without it the validation images have no classes.")
    number = {wnid: label for label, wnid in enumerate(classes)}
    there = {file.name: file for file in images_in(folder / "images")}
    files: list[Path] = []
    labels: list[int] = []
    for place, line in read_lines(listed).items():
        image, wnid, *_ = [*line.split(), ""]
        if wnid not in number or image not in there:
            raise DataError(
                f"{place}, '{line}', does not name an image of '{folder / 'images'}' and a class of the training "
                "images: unpack all of the archive."
            )
        files.append(there[image])
        labels.append(number[wnid])
    return image_files(files, labels)
