"""Digits-Five: ten digits, handwritten, scanned, photographed and synthetic, in the files that each set comes in.

FedBN and FedWon use all five, FedCoda four of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.arrays import first_file, idx_items, libsvm_items, mat_items, npz_items
from fedkeel.data.formats.metadata import read_lines
from fedkeel.data.formats.parquet import parquet_domain, parquet_files
from fedkeel.data.listing import (
    Domain,
    Findings,
    Items,
    Listing,
    assemble,
    class_files,
    image_files,
    images_in,
    train_and_test,
    visible_folders,
)
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root, names
from fedkeel.errors import DataError, unknown

CLASSES = tuple("0123456789")
FOLDERS = {
    "mnist": ("mnist", "MNIST", "MNIST/raw", "mnist/raw"),
    "mnistm": ("mnistm", "mnist_m", "mnist-m", "MNIST-M", "MNIST_M"),
    "svhn": ("svhn", "SVHN"),
    "synth": ("synth", "syn", "synthdigits", "synth_digits", "SynthDigits"),
    "usps": ("usps", "USPS"),
}
MATS = {
    "svhn": (("train_32x32.mat",), ("test_32x32.mat",)),
    "synth": (("synth_train_32x32.mat", "train_32x32.mat"), ("synth_test_32x32.mat", "test_32x32.mat")),
}


def scan(root: Path, findings: Findings) -> Listing:
    domains: dict[str, Domain] = {}
    used: set[str] = set()
    for domain, folders in FOLDERS.items():
        present = [root / folder for folder in folders if (root / folder).is_dir()]
        used |= {folder.partition("/")[0] for folder in folders}
        if not present and not (root / f"{domain}.npz").is_file():
            findings.extra(f"The domain '{domain}' of digits-five is not in '{root}' and is left out.")
            continue
        with findings.part():
            domains[domain] = read_domain(domain, root, present, findings)
    for folder in visible_folders(root):
        if folder.name in used:
            continue
        if parquet_files(folder, "train"):
            findings.extra(f"The domain '{folder.name}' is none of Digits-Five's, and is read under its own name.")
            with findings.part():
                domains[folder.name] = train_and_test(*parquet_domain("digits-five", folder, 10))
        else:
            findings.extra(f"The folder '{folder}' is no domain of digits-five and is not used.")
    if not domains:
        findings.missing(f"There is no domain of digits-five in '{root}': put each into a folder of its name.")
    return Listing("digits-five", root, CLASSES, dict(sorted(domains.items())))


def read_domain(domain: str, root: Path, folders: Sequence[Path], findings: Findings) -> Domain:
    """One domain, in the first form that is there: parquet, its authors' files, labelled images, a tree, npz."""
    name = f"digits-five-{domain}"
    for folder in folders:
        if parquet_files(folder, "train") or parquet_files(folder, "test"):
            return train_and_test(*parquet_domain(name, folder, 10))
        found = authors_files(domain, name, folder) or labelled(domain, folder) or tree(name, folder, findings)
        if found:
            return train_and_test([found[0]], [found[1]])
    for pack in (root / f"{domain}.npz", *(folder / f"{domain}.npz" for folder in folders)):
        if pack.is_file():
            train, test = npz_items(name, pack)
            return train_and_test([train], [test])
    raise DataError(f"There is no data of '{domain}' in '{folders[0]}': {expected(domain, folders[0])}")


def expected(domain: str, folder: Path) -> str:
    """What to get, and for a form that is not read, that it is not."""
    wanted = {
        "mnist": "get the four idx files train-images-idx3-ubyte.gz and so on.",
        "mnistm": "get mnist_m_train/ and mnist_m_test/ with their files of labels, or a tree {train,test}/<digit>/.",
        "svhn": "get train_32x32.mat and test_32x32.mat.",
        "synth": "get synth_train_32x32.mat and synth_test_32x32.mat.",
        "usps": "get usps.bz2 and usps.t.bz2 from the libsvm page.",
    }[domain]
    other = {".pkl": "pickles", ".pt": "pickles", ".pth": "pickles", ".h5": "HDF5 files", ".hdf5": "HDF5 files"}
    kinds = sorted({other[file.suffix] for file in folder.iterdir() if file.suffix in other})
    return f"{' and '.join(kinds)} are not read; {wanted}" if kinds else wanted


def authors_files(domain: str, name: str, folder: Path) -> tuple[Items, Items] | None:
    if domain == "mnist":
        pairs = []
        for use in ("train", "t10k"):
            both = (
                [f"{use}-images-idx3-ubyte", f"{use}-images.idx3-ubyte"],
                [f"{use}-labels-idx1-ubyte", f"{use}-labels.idx1-ubyte"],
            )
            pairs.append([(stem[0], first_file(folder, stem)) for stem in both])
        files = [file for pair in pairs for _, file in pair]
        if not any(files):
            return None
        for stem, file in (entry for pair in pairs for entry in pair):
            if file is None:
                raise DataError(f"'{folder / stem}' is missing, with or without .gz: put it beside the other three.")
        a, b, c, d = (file for file in files if file)
        return idx_items(f"{name}-train", a, b), idx_items(f"{name}-test", c, d)
    if domain == "usps":
        train, test = first_file(folder, ["usps"]), first_file(folder, ["usps.t"])
        if train is None and test is None:
            return None
        if train is None or test is None:
            lost = "usps.bz2" if train is None else "usps.t.bz2"
            raise DataError(f"'{folder / lost}' is missing: usps needs usps.bz2 and usps.t.bz2.")
        return libsvm_items(f"{name}-train", train), libsvm_items(f"{name}-test", test)
    if domain in MATS:
        train, test = (first_file(folder, stems) for stems in MATS[domain])
        if train is None and test is None:
            return None
        if train is None or test is None:
            lost = MATS[domain][0 if train is None else 1][0]
            raise DataError(f"'{folder / lost}' is missing: {domain} needs a training and a test file.")
        return mat_items(f"{name}-train", train), mat_items(f"{name}-test", test)
    return None


def labelled(domain: str, folder: Path) -> tuple[Items, Items] | None:
    """MNIST-M as published: `mnist_m_train/*.png` and lines `00000000.png 5` in `mnist_m_train_labels.txt`."""
    lists = [folder / f"mnist_m_{use}_labels.txt" for use in ("train", "test")]
    if domain != "mnistm" or not any(file.is_file() for file in lists):
        return None
    both = []
    for file in lists:
        if not file.is_file():
            raise DataError(f"'{file}' is missing: mnistm needs a file of labels for training and one for testing.")
        place = folder / file.name.removesuffix("_labels.txt")
        there = {image.name: image for image in images_in(place)} if place.is_dir() else {}
        files, labels = [], []
        for number, line in enumerate(read_lines(file), start=1):
            if not line.strip():
                continue
            image, _, label = line.strip().rpartition(" ")
            if image not in there or label not in CLASSES:
                raise DataError(
                    f"Line {number} of '{file}', '{line.strip()}', does not name an image of '{place}' and its digit: "
                    "unpack all of the archive."
                )
            files.append(there[image])
            labels.append(int(label))
        both.append(image_files(files, labels))
    return both[0], both[1]


def tree(name: str, folder: Path, findings: Findings) -> tuple[Items, Items] | None:
    """`train/<digit>/*.png`, and `test/<digit>/` or `val/<digit>/`, as Digits-DG calls it."""
    tested = next((folder / use for use in ("test", "val") if (folder / use).is_dir()), None)
    if tested is None or not (folder / "train").is_dir():
        return None
    for child in visible_folders(folder):
        if child.name not in ("train", tested.name):
            findings.extra(f"The folder '{child}' is no part of {name} and is not used.")
    both = [image_files(*class_files(name, place, CLASSES, findings)) for place in (folder / "train", tested)]
    return both[0], both[1]


DIGITS_FIVE = publish(
    Published(
        name="digits-five",
        what="Digits of MNIST, MNIST-M, SVHN, SynthDigits and USPS.",
        home="https://github.com/med-air/FedBN",
        licence="SVHN and SynthDigits for non-commercial use; the others state none",
        layout="digits/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte   or .gz\n"
        "digits/mnistm/mnist_m_{train,test}/*.png and mnist_m_{train,test}_labels.txt\n"
        "digits/svhn/{train,test}_32x32.mat\n"
        "digits/synth/synth_{train,test}_32x32.mat\n"
        "digits/usps/usps.bz2 and usps.t.bz2\n"
        "or for any of them <domain>/{train,test}.parquet, <domain>/{train,test}/<digit>/*.png, or <domain>.npz",
        folders=("digits-five", "digits_five", "digits", "DigitsFive"),
        classes=10,
        sizes={
            "mnist": {"train": 60000, "test": 10000},
            # FedBN's copy is made from all of MNIST; the one that Ganin et al. publish is a little smaller.
            "mnistm": {"train": (60000, 59001), "test": (10000, 9001)},
            "svhn": {"train": 73257, "test": 26032},
            "synth": {"train": 479400, "test": 9553},
            "usps": {"train": 7291, "test": 2007},
        },
        scan=scan,
    )
)


@DATASETS.register("digits-five", paper="Peng et al., ICCV 2019 (arXiv:1812.01754); sizes and transforms of FedBN")
def read_digits_five(
    root: str | os.PathLike[str] | None = None,
    size: int = 28,
    domains: str | Sequence[str] | None = None,
    validation: float = 0.0,
    split_seed: int = 0,
    subset: str | None = None,
) -> Source:
    """Digits-Five: 10 digits in MNIST, MNIST-M, SVHN, USPS and a synthetic set, each with its own test set.

    `domains` reads some of them only. `subset="fedbn"` merges each training and test set and cuts them anew, 80 / 20,
    to train on the first 743 images of each domain; `subset="fedwon"` on 7,438; `subset="fedcoda"` leaves USPS out and
    takes 600 images of each digit, 80 / 20.
    """
    rules.check_subset("digits-five", subset, ("fedbn", "fedwon", "fedcoda"))
    listing = scanned(DIGITS_FIVE, find_root("digits-five", root, DIGITS_FIVE.folders))
    chosen = dict(listing.domains)
    if domains is not None:
        for domain in names(domains):
            if domain not in chosen:
                raise DataError(unknown("domain", domain, chosen))
        chosen = {domain: chosen[domain] for domain in names(domains)}
    if subset in ("fedbn", "fedwon"):
        parts = rules.merged(chosen, 0.1 if subset == "fedbn" else 1.0)
    elif subset == "fedcoda":
        parts = rules.same_per_class({n: d for n, d in chosen.items() if n != "usps"}, 600, 0.2, split_seed)
    else:
        parts = rules.by_shares(chosen, validation, 0.0, split_seed)
    return assemble(listing, parts, size, train="normalise", test="normalise")
