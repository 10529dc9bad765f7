"""Data sets of one look: CIFAR-10, CIFAR-100 (Krizhevsky, 2009), STL-10 and Tiny-ImageNet, for shifts of the labels.

CIFAR's version for Python is pickled. Pickles can run any code when they are read, so they are not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedkeel.data.dataset import Images, Manifest, image_files, split_domain
from fedkeel.data.formats.arrays import cifar_images, parquet_domain, stl_images
from fedkeel.data.formats.folders import class_images, images_in, split_folders
from fedkeel.data.formats.lists import read_lines
from fedkeel.data.reader import Reader, published
from fedkeel.errors import DataError
from fedkeel.options import Count

HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class CIFAR(Reader):
    """What the two have in common."""

    paper = "Krizhevsky, 2009"
    home = "https://www.cs.toronto.edu/~kriz/cifar.html"
    licence = "none stated"
    transforms = ("crop(padding=4)+flip+normalise(like=cifar10)", "normalise(like=cifar10)")
    files: ClassVar[tuple[list[str], list[str]]]  # of the binary version, to train and to test on
    label_bytes: ClassVar[int]

    size: Count = 32

    def scan(self, root: Path) -> Manifest:
        number = len(self.class_names)
        found = parquet_domain(root, number) or split_folders(self.name, root, self.class_names, "train", "test")
        if not found:
            found = [
                [cifar_images(self.require(root / file), self.label_bytes, number) for file in files]
                for files in self.files
            ]
        return Manifest(self.name, root, self.class_names, {self.name: split_domain(*found)})


@published
@dataclass(frozen=True)
class CIFAR10(CIFAR):
    """CIFAR-10: 50,000 + 10,000 images of 10 classes, one domain, with the official test set.

    `validation` is a share of the training set, none by default.
    """

    name = "cifar10"
    layout = (
        "cifar10/cifar-10-batches-bin/data_batch_{1..5}.bin and test_batch.bin   the binary version, no pickles\n"
        "or cifar10/{train,test}.parquet, or cifar10/{train,test}/<class>/*.png"
    )
    folders = ("cifar10", "cifar-10-batches-bin", "CIFAR10", "cifar-10", "cifar-10-batches-py")
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    sizes = {"cifar10": 60000}
    inside = ("cifar-10-batches-bin",)
    label_bytes = 1
    files = ([f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"])


@published
@dataclass(frozen=True)
class CIFAR100(CIFAR):
    """CIFAR-100: 50,000 + 10,000 images of 100 classes, one domain, with the official test set.

    Normalised as CIFAR-10, as HBN does. `validation` is a share of the training set: UniVarFL takes 0.1.
    """

    name = "cifar100"
    layout = (
        "cifar100/cifar-100-binary/train.bin and test.bin   the binary version, no pickles\n"
        "or cifar100/{train,test}.parquet, or cifar100/{train,test}/<class>/*.png"
    )
    folders = ("cifar100", "cifar-100-binary", "CIFAR100", "cifar-100", "cifar-100-python")
    class_names = tuple(HUNDRED.split())
    sizes = {"cifar100": 60000}
    inside = ("cifar-100-binary",)
    label_bytes = 2
    files = (["train.bin"], ["test.bin"])


@published
@dataclass(frozen=True)
class STL10(Reader):
    """STL-10: 5,000 + 8,000 images of 10 classes, one domain, with the official test set; its unlabelled images are
    not used.

    `validation` is a share of the training set, none by default: UniVarFL takes 0.1.
    """

    name = "stl10"
    paper = "Coates et al., AISTATS 2011; transforms of FedUV"
    home = "https://cs.stanford.edu/~acoates/stl10/"
    licence = "as ImageNet, from which it is taken: for research"
    layout = "stl10_binary/{train,test}_{X,y}.bin   the binary version"
    folders = ("stl10", "stl10_binary", "STL10", "stl-10")
    inside = ("stl10_binary",)
    class_names = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
    sizes = {"stl10": 13000}
    transforms = ("crop(padding=4)+flip+normalise", "normalise")

    size: Count = 96

    def scan(self, root: Path) -> Manifest:
        train, test = (
            stl_images(*(self.require(root / f"{use}_{kind}.bin") for kind in "Xy")) for use in ("train", "test")
        )
        return Manifest(self.name, root, self.class_names, {"stl10": split_domain([train], [test])})


@published
@dataclass(frozen=True)
class TinyImageNet(Reader):
    """Tiny-ImageNet: 100,000 + 10,000 images of 200 classes, one domain.

    `validation` is a share of the training set, none by default.
    """

    name = "tiny-imagenet"
    paper = "Le and Yang, CS231n, 2015; transforms of HBN"
    home = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    licence = "as ImageNet: for non-commercial research"
    layout = (
        "tiny-imagenet-200/wnids.txt\n"
        "tiny-imagenet-200/train/<wnid>/images/*.JPEG\n"
        "tiny-imagenet-200/val/images/*.JPEG and val/val_annotations.txt"
    )
    folders = ("tiny-imagenet", "tiny-imagenet-200", "tiny_imagenet", "TinyImageNet")
    inside = ("tiny-imagenet-200",)
    sizes = {"tiny-imagenet": 110000}

    size: Count = 64

    def scan(self, root: Path) -> Manifest:
        classes = tuple(sorted(" ".join(read_lines(self.require(root / "wnids.txt")).values()).split()))
        trained = class_images(self.name, root / "train", classes, below="images")
        domain = split_domain([trained], [self.annotated(root / "val", classes)])
        return Manifest(self.name, root, classes, {self.name: domain})

    def annotated(self, folder: Path, classes: tuple[str, ...]) -> Images:
        """`val/images/*.JPEG`, whose classes are in the lines `file wnid x y w h` of `val/val_annotations.txt`."""
        number = {wnid: label for label, wnid in enumerate(classes)}
        there = {file.name: file for file in images_in(folder / "images")}
        files: list[Path] = []
        labels: list[int] = []
        for place, line in read_lines(self.require(folder / "val_annotations.txt")).items():
            image, wnid, *_ = [*line.split(), ""]
            if wnid not in number or image not in there:
                raise DataError(
                    f"{place}, '{line}', does not name an image of '{folder / 'images'}' and a class: get all of it."
                )
            files.append(there[image])
            labels.append(number[wnid])
        return image_files(files, labels)
