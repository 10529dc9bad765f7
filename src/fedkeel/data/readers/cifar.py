"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): the binary version, parquet, or folders of images.

The version for Python is pickled. Pickles can run any code when they are read, so they are not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedkeel.data.dataset import Domain, Findings, Images, Manifest, split_domain
from fedkeel.data.formats.arrays import cifar_images, parquet_domain
from fedkeel.data.formats.folders import class_images, step_into
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
    binary: ClassVar[str]  # the folder of the authors' binary version, and its files
    files: ClassVar[dict[str, list[str]]]
    pickled: ClassVar[str]
    label_bytes: ClassVar[int]

    size: Count = 32

    def scan(self, root: Path, findings: Findings) -> Manifest:
        domains: dict[str, Domain] = {}
        with findings.part():
            domains[self.name] = self.domain(root, findings)
        return Manifest(self.name, root, self.class_names, domains)

    def domain(self, root: Path, findings: Findings) -> Domain:
        """In the first form that is there: parquet, the binary files, trees."""
        name, binary, pickled = self.name, step_into(root, self.binary), step_into(root, self.pickled)
        if parquet := parquet_domain(name, root, len(self.class_names)):
            return split_domain(*parquet)
        if any((binary / file).is_file() for part in self.files.values() for file in part):
            parts: dict[str, list[Images]] = {"train": [], "test": []}
            for use, wanted in self.files.items():
                for file in wanted:
                    if (binary / file).is_file():
                        parts[use].append(cifar_images(name, binary / file, self.label_bytes, len(self.class_names)))
                    else:
                        findings.missing(f"'{binary / file}' is missing: put it beside the other files of {name}.")
            return split_domain(**parts)
        lost = [root / use for use in ("train", "test") if not (root / use).is_dir()]
        if not lost:
            return split_domain(
                *([class_images(name, root / use, self.class_names, findings)] for use in ("train", "test"))
            )
        if len(lost) == 1:
            raise DataError(f"'{lost[0]}' is missing: {name} has the folders train/<class>/ and test/<class>/.")
        if any((pickled / file).is_file() for file in ("data_batch_1", "test_batch", "train", "test")):
            raise DataError(
                f"'{pickled}' is the pickled version of {name}, which is not read because pickles can run any code: "
                "get the binary version from the same page."
            )
        raise DataError(f"There is no {name} in '{root}': 'fedkeel data list {name}' shows how its folder must look.")


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
    binary, pickled, label_bytes = "cifar-10-batches-bin", "cifar-10-batches-py", 1
    files = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


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
    binary, pickled, label_bytes = "cifar-100-binary", "cifar-100-python", 2
    files = {"train": ["train.bin"], "test": ["test.bin"]}
