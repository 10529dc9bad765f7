"""DomainNet (Peng et al., ICCV 2019): 345 classes in six styles, of which the papers use the ten of FedBN or the
hundred with the most images.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.metadata import read_lines
from fedkeel.data.formats.split_lists import class_of, read_lists
from fedkeel.data.formats.trees import scan_tree
from fedkeel.data.listing import Findings, Listing, Parts, assemble, images_in, visible_folders
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root, names
from fedkeel.errors import DataError, nearest

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
FEDBN = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip


def scan(root: Path, findings: Findings, classes: str | Sequence[str] = "fedbn") -> Listing:
    """The classes: FedBN's ten (`fedbn`), those with the most images (`top-100`), `all`, or a list."""
    folders = {
        domain: {folder.name: folder for folder in visible_folders(root / domain)} if (root / domain).is_dir() else {}
        for domain in DOMAINS
    }
    present = sorted({label for own in folders.values() for label in own})
    chosen = choose(classes, present, folders)

    def lists(domain: str, position: Mapping[str, int], _: Sequence[int]) -> Parts | None:
        # The authors' lists lie beside the domains or in splits/, and name all 345 classes.
        place = "splits" if (root / "splits" / f"{domain}_train.txt").is_file() else "."
        return read_lists(root, domain, position, folder=place, classes=set(chosen))

    return scan_tree("domainnet", root, DOMAINS, chosen, findings, lists=lists, all_classes=present)


def choose(classes: str | Sequence[str], present: list[str], folders: Mapping[str, Mapping[str, Path]]) -> list[str]:
    if classes == "fedbn":
        return list(FEDBN)
    if classes == "all":
        return present
    if isinstance(classes, str) and classes.startswith("top-") and classes[4:].isdigit():
        count = int(classes[4:])
        if not 1 <= count <= len(present):
            raise DataError(f"classes is '{classes}', but there are {len(present)} classes: give a number up to that.")
        sizes = Counter(dict.fromkeys(present, 0))
        for own in folders.values():
            for label, folder in own.items():
                sizes[label] += len(images_in(folder))
        return sorted(sorted(present, key=lambda label: (-sizes[label], label))[:count])
    given = names(classes)
    for label in given:
        if label not in present:
            raise DataError(
                f"DomainNet has no class '{label}': {nearest(label, [*present, 'fedbn', 'all', 'top-100'])}"
            )
    return given


def is_of_fedbn(file: Path) -> bool:
    """FedBN's lists name its ten classes and no other; the authors' lists go by the same names."""
    lines = read_lines(file) if file.is_file() else []
    named = {class_of(line) for line in lines if line.strip()}
    return bool(named) and named <= set(FEDBN)


DOMAINNET = publish(
    Published(
        name="domainnet",
        what="Objects in six styles; by default FedBN's ten classes of the 345.",
        home="http://ai.bu.edu/M3SDA/",
        licence="fair use, for non-commercial research",
        layout="domainnet/<domain>/<class>/*.jpg   "
        "with the domains clipart, infograph, painting, quickdraw, real, sketch\n"
        "domainnet/<domain>_{train,test}.txt   the authors' lists, if you have them\n"
        "domainnet/splits/<domain>_{train,test}.txt   these lists, or FedBN's as text: they go first",
        folders=("domainnet", "DomainNet", "domain_net"),
        classes=10,
        sizes={
            "clipart": {"images": 2629},
            "infograph": {"images": 3283},
            "painting": {"images": 3091},
            "quickdraw": {"images": 5000},
            "real": {"images": 6081},
            "sketch": {"images": 2767},
        },
        scan=scan,
    )
)
# Of all 345 classes, in the cleaned version: what `fedkeel data check 'domainnet(classes=all)'` compares with.
ALL_SIZES = {
    "clipart": {"images": 48129, "train": 33525, "test": 14604},
    "infograph": {"images": 51605, "train": 36023, "test": 15582},
    "painting": {"images": 72266, "train": 50416, "test": 21850},
    "quickdraw": {"images": 172500, "train": 120750, "test": 51750},
    "real": {"images": 172947, "train": 120906, "test": 52041},
    "sketch": {"images": 69128, "train": 48212, "test": 20916},
}


@DATASETS.register("domainnet", paper="Peng et al., ICCV 2019 (arXiv:1812.01754); classes and transforms of FedBN")
def read_domainnet(
    root: str | os.PathLike[str] | None = None,
    size: int = 256,
    classes: str | Sequence[str] = "fedbn",
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    subset: str | None = None,
) -> Source:
    """DomainNet: objects in clipart, infograph, painting, quickdraw, real and sketch; FedBN's ten classes of the 345.

    `classes` may also be `top-100`, the hundred with the most images, `all`, or a list. `subset="fedbn"` takes
    105 / 105 images of each domain to train / validate, `subset="greg"` 630 / 210, both with 20 % to test on;
    `subset="fedcoda"` splits 80 / 20.
    """
    rules.check_subset("domainnet", subset, ("fedbn", "greg", "fedcoda"))
    listing = scanned(DOMAINNET, find_root("domainnet", root, DOMAINNET.folders), classes=classes)
    domains = listing.domains
    if subset in ("fedbn", "greg"):
        if not all(is_of_fedbn(listing.root / "splits" / f"{domain}_train.txt") for domain in domains):
            domains = rules.unsplit(domains)
        rules.without_lists("domainnet", domains)
        shares = (0.05, 0.05) if subset == "fedbn" else (0.3, 0.1)
        parts = rules.equal_shares(domains, *shares, 0.2, split_seed)
    elif subset == "fedcoda":
        parts = rules.by_shares(domains, 0, 0.2, split_seed, official=False)
    else:
        parts = rules.by_shares(domains, validation, test, split_seed)
    return assemble(listing, parts, size, train="flip+rotation(degrees=30)", test="")
