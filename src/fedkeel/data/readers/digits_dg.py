"""Digits-DG (Zhou et al., ECCV 2020): four sets of digits, drawn down to 600 images of each digit; FedCoda's Digits."""

from __future__ import annotations

import os
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.listing import Findings, Listing, assemble, train_and_test, visible_folders
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.readers.digits_five import CLASSES, tree
from fedkeel.data.source import DATASETS, Source, find_root

DOMAINS = ("mnist", "mnist_m", "svhn", "syn")


def scan(root: Path, findings: Findings) -> Listing:
    domains = {}
    for domain in DOMAINS:
        found = tree("digits-dg", root / domain, findings) if (root / domain).is_dir() else None
        if found is None:
            lacking = " and ".join(use for use in ("train", "val") if not (root / domain / use).is_dir())
            findings.missing(f"'{root / domain}' lacks {lacking}: digits-dg has train and val for every domain.")
        else:
            domains[domain] = train_and_test([found[0]], [found[1]])
    for folder in visible_folders(root):
        if folder.name not in DOMAINS:
            findings.extra(f"The folder '{folder}' is no domain of digits-dg and is not used.")
    return Listing("digits-dg", root, CLASSES, domains)


DIGITS_DG = publish(
    Published(
        name="digits-dg",
        what="Four sets of digits with 600 images of each digit, 32 px, split 80 / 20: FedCoda's Digits.",
        home="https://github.com/KaiyangZhou/Dassl.pytorch",
        licence="as the sets that it is drawn from",
        layout="digits_dg/<domain>/{train,val}/<digit>/*.jpg   with the domains mnist, mnist_m, svhn, syn",
        folders=("digits-dg", "digits_dg", "DigitsDG"),
        classes=10,
        sizes={domain: {"train": 4800, "test": 1200} for domain in DOMAINS},
        scan=scan,
    )
)


@DATASETS.register("digits-dg", paper="Zhou et al., ECCV 2020 (arXiv:2007.03304)")
def read_digits_dg(
    root: str | os.PathLike[str] | None = None, size: int = 32, validation: float = 0.0, split_seed: int = 0
) -> Source:
    """Digits-DG: 6,000 digits each of MNIST, MNIST-M, SVHN and SynthDigits, with an 80 / 20 split of their own."""
    listing = scanned(DIGITS_DG, find_root("digits-dg", root, DIGITS_DG.folders))
    parts = rules.by_shares(listing.domains, validation, 0.0, split_seed)
    return assemble(listing, parts, size, train="normalise", test="normalise")
