"""Digits-Five: ten digits, handwritten, scanned, photographed and synthetic, in the files that each set comes in.

FedBN and FedWon use all five, FedCoda four of them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fedkeel.data.dataset import Domain, Images, Manifest, Parts, image_files, split_domain
from fedkeel.data.formats.arrays import (
    first_file,
    idx_images,
    libsvm_images,
    mat_images,
    parquet_domain,
    parquet_files,
)
from fedkeel.data.formats.folders import class_images, images_in, tell_strange_folders, visible_folders
from fedkeel.data.formats.lists import read_lines
from fedkeel.data.reader import Reader, published
from fedkeel.data.splits import merged, same_per_class
from fedkeel.errors import DataError, unknown
from fedkeel.options import Count
from fedkeel.spec import names

log = logging.getLogger("fedkeel")

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class DigitFiles:
    """Where one of the five comes from: its folders, and its authors' files to train and to test on, by their names."""

    folders: tuple[str, ...]
    wanted: str  # what to get if there is nothing
    train: Sequence[tuple[str, ...]] = ()
    test: Sequence[tuple[str, ...]] = ()
    read: Callable[..., Images] = mat_images


ORIGINS = {
    "mnist": DigitFiles(
        ("mnist", "MNIST", "MNIST/raw", "mnist/raw"),
        "get the four idx files train-images-idx3-ubyte.gz and so on.",
        [(f"train-{kind}-ubyte", f"train-{kind.replace('-', '.')}-ubyte") for kind in ("images-idx3", "labels-idx1")],
        [(f"t10k-{kind}-ubyte", f"t10k-{kind.replace('-', '.')}-ubyte") for kind in ("images-idx3", "labels-idx1")],
        idx_images,
    ),
    "mnistm": DigitFiles(
        ("mnistm", "mnist_m", "mnist-m", "MNIST-M", "MNIST_M"),
        "get mnist_m_train/ and mnist_m_test/ with their files of labels, or a tree {train,test}/<digit>/.",
    ),
    "svhn": DigitFiles(
        ("svhn", "SVHN"),
        "get train_32x32.mat and test_32x32.mat.",
        [("train_32x32.mat",)],
        [("test_32x32.mat",)],
    ),
    "synth": DigitFiles(
        ("synth", "syn", "synthdigits", "synth_digits", "SynthDigits"),
        "get synth_train_32x32.mat and synth_test_32x32.mat.",
        [("synth_train_32x32.mat", "train_32x32.mat")],
        [("synth_test_32x32.mat", "test_32x32.mat")],
    ),
    "usps": DigitFiles(
        ("usps", "USPS"),
        "get usps.bz2 and usps.t.bz2 from the libsvm page.",
        [("usps.bz2", "usps")],
        [("usps.t.bz2", "usps.t")],
        libsvm_images,
    ),
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
    what = "Digits of MNIST, MNIST-M, SVHN, SynthDigits and USPS."
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
    sizes = {
        "mnist": {"train": 60000, "test": 10000},
        # FedBN's copy is made from all of MNIST; the one that Ganin et al. publish is a little smaller.
        "mnistm": {"train": (60000, 59001), "test": (10000, 9001)},
        "svhn": {"train": 73257, "test": 26032},
        "synth": {"train": 479400, "test": 9553},
        "usps": {"train": 7291, "test": 2007},
    }
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
        for domain, origin in ORIGINS.items():
            present = [root / folder for folder in origin.folders if (root / folder).is_dir()]
            if not present:
                log.warning("The domain '%s' of digits-five is not in '%s' and is left out.", domain, root)
                continue
            domains[domain] = read_domain(domain, present)
        used = {folder.partition("/")[0] for origin in ORIGINS.values() for folder in origin.folders}
        others = [folder for folder in visible_folders(root) if folder.name not in used]
        for folder in others:
            if parquet_files(folder, "train"):
                log.warning("The domain '%s' is none of Digits-Five's, and is read under its own name.", folder.name)
                domains[folder.name] = split_domain(*parquet_domain("digits-five", folder, 10))
        tell_strange_folders(root, [*used, *domains], "domain of digits-five")
        if not domains:
            raise DataError(f"There is no domain of digits-five in '{root}': put each into a folder of its name.")
        return Manifest(self.name, root, DIGITS, dict(sorted(domains.items())))


def read_domain(domain: str, folders: Sequence[Path]) -> Domain:
    """One domain, in the first form that is there: parquet, its authors' files, labelled images, a tree."""
    for folder in folders:
        found = parquet_domain("digits-five", folder, 10) or authors_files(domain, folder)
        found = found or labelled(domain, folder) or tree(f"digits-five-{domain}", folder)
        if found:
            return split_domain(*found)
    raise DataError(
        f"There is no data of '{domain}' in '{folders[0]}' (pickles and HDF5 files are not read): "
        f"{ORIGINS[domain].wanted}"
    )


def authors_files(domain: str, folder: Path) -> list[list[Images]]:
    """Those to train and those to test on, as from the next two; none if there is none."""
    origin = ORIGINS[domain]
    found = {stems: first_file(folder, stems) for stems in (*origin.train, *origin.test)}
    if not any(found.values()):
        return []
    for stems, file in found.items():
        if file is None:
            raise DataError(f"'{folder / stems[0]}' is missing: {origin.wanted}")
    return [[origin.read(*(found[stems] for stems in files))] for files in (origin.train, origin.test)]


def labelled(domain: str, folder: Path) -> list[list[Images]]:
    """MNIST-M as published: `mnist_m_train/*.png` and lines `00000000.png 5` in `mnist_m_train_labels.txt`."""
    lists = [folder / f"mnist_m_{use}_labels.txt" for use in ("train", "test")]
    if domain != "mnistm" or not any(file.is_file() for file in lists):
        return []
    both = []
    for file in lists:
        if not file.is_file():
            raise DataError(f"'{file}' is missing: {ORIGINS[domain].wanted}")
        pictures = folder / file.name.removesuffix("_labels.txt")
        there = {image.name: image for image in images_in(pictures)}
        files, labels = [], []
        for place, line in read_lines(file).items():
            image, _, label = line.rpartition(" ")
            if image not in there or label not in DIGITS:
                raise DataError(
                    f"{place}, '{line}', does not name an image of '{pictures}' and its digit: unpack all of the "
                    "archive."
                )
            files.append(there[image])
            labels.append(int(label))
        both.append([image_files(files, labels)])
    return both


def tree(name: str, folder: Path) -> list[list[Images]]:
    """`train/<digit>/*.png`, and `test/<digit>/` or `val/<digit>/`, as Digits-DG calls it."""
    tested = next((folder / use for use in ("test", "val") if (folder / use).is_dir()), None)
    if tested is None or not (folder / "train").is_dir():
        return []
    tell_strange_folders(folder, ("train", tested.name), f"part of {name}")
    return [[class_images(name, place, DIGITS)] for place in (folder / "train", tested)]
