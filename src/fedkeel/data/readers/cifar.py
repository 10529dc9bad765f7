"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): the binary version, parquet, or folders of images.

The version for Python is pickled. Pickles can run any code when they are read, so they are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedkeel.data.dataset import Images, Manifest, split_domain
from fedkeel.data.formats.arrays import cifar_images, parquet_domain
from fedkeel.data.formats.folders import class_images
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
        return Manifest(self.name, root, self.class_names, {self.name: split_domain(*self.images(root))})

    def images(self, root: Path) -> Sequence[Sequence[Images]]:
        """To train and to test on, in the first form that is there: parquet, the binary files, trees."""
        name, classes = self.name, self.class_names
        if parquet := parquet_domain(name, root, len(classes)):
            return parquet
        files = {file: (root / file).is_file() for part in self.files for file in part}
        if any(files.values()):
            for file, there in files.items():
                if not there:
                    raise DataError(f"'{root / file}' is missing: put it beside the other files of {name}.")
            return [[cifar_images(root / file, self.label_bytes, len(classes)) for file in part] for part in self.files]
        if not (root / "train").is_dir() or not (root / "test").is_dir():
            raise DataError(
                f"There is no {name} in '{root}': 'fedkeel data list {name}' shows how its folder must look; of the "
                "binary version, since pickles are not read."
            )
        return [[class_images(name, root / use, classes)] for use in ("train", "test")]


@published
@dataclass(frozen=True)
class CIFAR10(CIFAR):
    """CIFAR-10: 50,000 + 10,000 images of 10 classes, one domain, with the official test set.

    `validation` is a share of the training set, none by default.
    """

    name = "cifar10"
    what = "Ten classes of 32 px photographs, one domain."
    layout = (
        "cifar10/cifar-10-batches-bin/data_batch_{1..5}.bin and test_batch.bin   the binary version\n"
        "or cifar10/{train,test}.parquet, or cifar10/{train,test}/<class>/*.png"
    )
    folders = ("cifar10", "cifar-10-batches-bin", "CIFAR10", "cifar-10", "cifar-10-batches-py")
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    sizes = {"cifar10": {"train": 50000, "test": 10000}}
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
    what = "A hundred classes of 32 px photographs, one domain."
    layout = (
        "cifar100/cifar-100-binary/train.bin and test.bin   the binary version\n"
        "or cifar100/{train,test}.parquet, or cifar100/{train,test}/<class>/*.png"
    )
    folders = ("cifar100", "cifar-100-binary", "CIFAR100", "cifar-100", "cifar-100-python")
    class_names = tuple(HUNDRED.split())
    sizes = {"cifar100": {"train": 50000, "test": 10000}}
    inside = ("cifar-100-binary",)
    label_bytes = 2
    files = (["train.bin"], ["test.bin"])
