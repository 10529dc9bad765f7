"""Digits-Five: ten digits, handwritten, scanned, photographed and synthetic, in the files that each set comes in, which
FedBN and FedWon use; and Digits-DG, four of them drawn down to 600 images of each digit, which is FedCoda's Digits.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fedkeel.data.dataset import Domain, Images, Manifest, Parts, image_files, split_domain
from fedkeel.data.formats.arrays import idx_images, libsvm_images, mat_images, packed_or_not, parquet_domain
from fedkeel.data.formats.folders import images_in, split_folders, visible_folders
from fedkeel.data.formats.lists import read_lines
from fedkeel.data.reader import Reader, published
from fedkeel.data.splits import merged, same_per_class
from fedkeel.errors import DataError, unknown
from fedkeel.options import Count
from fedkeel.spec import names

log = logging.getLogger("fedkeel")

DIGITS = tuple("0123456789")
FOLDERS = {  # of each domain, any of which may be there
    "mnist": ("mnist", "MNIST", "MNIST/raw", "mnist/raw"),
    "mnistm": ("mnistm", "mnist_m", "mnist-m", "MNIST-M", "MNIST_M"),
    "svhn": ("svhn", "SVHN"),
    "synth": ("synth", "syn", "synthdigits", "synth_digits", "SynthDigits"),
    "usps": ("usps", "USPS"),
}
FILES: Mapping[str, tuple[Any, ...]] = {  # the authors': how they are read, those to train and those to test on
    "mnist": (
        idx_images,
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    ),
    "svhn": (mat_images, ("train_32x32.mat",), ("test_32x32.mat",)),
    "synth": (mat_images, ("synth_train_32x32.mat",), ("synth_test_32x32.mat",)),
    "usps": (libsvm_images, ("usps",), ("usps.t",)),
}


@published
@dataclass(frozen=True)
class DigitsFive(Reader):
    """Digits-Five: 10 digits in MNIST, MNIST-M, SVHN, USPS and a synthetic set, each with its own test set.

    `domains` reads some of them only. `subset="fedbn"` merges each training and test set and cuts them anew, 80 / 20,
    to train on the first 743 images of each domain; `subset="fedwon"` on 7,438; `subset="fedcoda"` leaves USPS out and
    takes 600 images of each digit, 80 / 20.
    """

    name = "digits-five"
    paper = "Peng et al., ICCV 2019 (arXiv:1812.01754); sizes and transforms of FedBN"
    home = "https://github.com/med-air/FedBN"
    licence = "SVHN and SynthDigits for non-commercial use; the others state none"
    layout = (
        "digits/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte   or .gz\n"
        "digits/mnistm/mnist_m_{train,test}/*.png and mnist_m_{train,test}_labels.txt\n"
        "digits/svhn/{train,test}_32x32.mat\n"
        "digits/synth/synth_{train,test}_32x32.mat\n"
        "digits/usps/usps.bz2 and usps.t.bz2\n"
        "or for any of them <domain>/{train,test}.parquet, or <domain>/{train,test}/<digit>/*.png"
    )
    folders = ("digits-five", "digits_five", "digits", "DigitsFive")
    class_names = DIGITS
    # FedBN's copy of MNIST-M is made from all of MNIST; the one that Ganin et al. publish is a little smaller.
    sizes = {"mnist": 70000, "mnistm": (70000, 68002), "svhn": 99289, "synth": 488953, "usps": 9298}
    subsets = {
        "fedbn": partial(merged, share=0.1),
        "fedwon": partial(merged, share=1.0),
        "fedcoda": partial(same_per_class, per_class=600, test=0.2),
    }

    size: Count = 28
    domains: str | Sequence[str] | None = None
    subset: Literal["fedbn", "fedwon", "fedcoda"] | None = None

    def split(self, domains: Mapping[str, Domain]) -> dict[str, Parts]:
        wanted = list(domains) if self.domains is None else names(self.domains)
        for name in wanted:
            if name not in domains:
                raise DataError(unknown("domain", name, domains))
        without = ("usps",) if self.subset == "fedcoda" else ()
        return super().split({name: domains[name] for name in wanted if name not in without})

    def scan(self, root: Path) -> Manifest:
        domains: dict[str, Domain] = {}
        for domain, folders in FOLDERS.items():
            present = [root / folder for folder in folders if (root / folder).is_dir()]
            found = next(filter(None, (self.domain(domain, folder) for folder in present)), None)
            if found:
                domains[domain] = split_domain(*found)
            else:
                log.warning("The domain '%s' of digits-five is not in '%s' and is left out.", domain, root)
        used = {folder.partition("/")[0] for folders in FOLDERS.values() for folder in folders}
        for folder in (folder for folder in visible_folders(root) if folder.name not in used):
            found = parquet_domain(folder, 10)
            what = "read under its own name" if found else "not used"
            log.warning("The folder '%s' is no domain of digits-five and is %s.", folder, what)
            if found:
                domains[folder.name] = split_domain(*found)
        if not domains:
            raise DataError(f"There is no domain of digits-five in '{root}': put each into a folder of its name.")
        return Manifest(self.name, root, DIGITS, dict(sorted(domains.items())))

    def domain(self, domain: str, folder: Path) -> list[list[Images]]:
        """In the first form that is there: parquet, its authors' files, labelled images, a tree."""
        if found := parquet_domain(folder, 10):
            return found
        read, *parts = FILES.get(domain, (None,))
        wanted = [[packed_or_not(folder / name) for name in part] for part in parts]
        if any(file.is_file() for files in wanted for file in files):
            return [[read(*map(self.require, files))] for files in wanted]
        if domain == "mnistm" and (folder / "mnist_m_train_labels.txt").is_file():
            return [[self.labelled(folder / f"mnist_m_{use}")] for use in ("train", "test")]
        return split_folders(self.name, folder, DIGITS, "train", "test")

    def labelled(self, folder: Path) -> Images:
        """MNIST-M as published: `mnist_m_train/*.png` and lines `00000000.png 5` in `mnist_m_train_labels.txt`."""
        there = {image.name: image for image in images_in(folder)}
        files, labels = [], []
        for place, line in read_lines(self.require(folder.with_name(f"{folder.name}_labels.txt"))).items():
            image, _, label = line.rpartition(" ")
            if image not in there or label not in DIGITS:
                raise DataError(
                    f"{place}, '{line}', does not name an image of '{folder}' and its digit: get all of it."
                )
            files.append(there[image])
            labels.append(int(label))
        return image_files(files, labels)


@published
@dataclass(frozen=True)
class DigitsDG(Reader):
    """Digits-DG: 6,000 digits each of MNIST, MNIST-M, SVHN and SynthDigits, with an 80 / 20 split of their own."""

    name = "digits-dg"
    paper = "Zhou et al., ECCV 2020 (arXiv:2007.03304)"
    home = "https://github.com/KaiyangZhou/Dassl.pytorch"
    licence = "as the sets that it is drawn from"
    layout = "digits_dg/<domain>/{train,val}/<digit>/*.jpg   with the domains mnist, mnist_m, svhn, syn"
    folders = ("digits-dg", "digits_dg", "DigitsDG")
    class_names = DIGITS
    sizes = {"mnist": 6000, "mnist_m": 6000, "svhn": 6000, "syn": 6000}

    size: Count = 32

    def scan(self, root: Path) -> Manifest:
        domains = {}
        for domain in self.sizes:
            uses = [self.require(root / domain / use).name for use in ("train", "val")]
            domains[domain] = split_domain(*split_folders(self.name, root / domain, self.class_names, *uses))
        return Manifest(self.name, root, self.class_names, domains)
