"""DomainNet (Peng et al., ICCV 2019): 345 classes in six styles, of which the papers use the ten of FedBN or the
hundred with the most images.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fedkeel.data.dataset import Domain, Parts
from fedkeel.data.formats.folders import images_in, visible_folders
from fedkeel.data.formats.lists import class_of, read_lines, read_lists
from fedkeel.data.reader import FEDBN, Sizes, TreeReader, published
from fedkeel.data.splits import by_shares, equal_shares
from fedkeel.errors import DataError, nearest
from fedkeel.options import Count
from fedkeel.spec import names

TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
# Of all 345 classes, in the cleaned version: what `fedkeel data check 'domainnet(classes=all)'` compares with.
ALL_SIZES = {
    "clipart": {"images": 48129, "train": 33525, "test": 14604},
    "infograph": {"images": 51605, "train": 36023, "test": 15582},
    "painting": {"images": 72266, "train": 50416, "test": 21850},
    "quickdraw": {"images": 172500, "train": 120750, "test": 51750},
    "real": {"images": 172947, "train": 120906, "test": 52041},
    "sketch": {"images": 69128, "train": 48212, "test": 20916},
}


@published
@dataclass(frozen=True)
class DomainNet(TreeReader):
    """DomainNet: objects in clipart, infograph, painting, quickdraw, real and sketch; FedBN's ten classes of the 345.

    `classes` may also be `top-100`, the hundred with the most images, `all`, or a list. `subset="fedbn"` takes
    105 / 105 images of each domain to train / validate, `subset="greg"` 630 / 210, both with 20 % to test on;
    `subset="fedcoda"` splits 80 / 20.
    """

    name = "domainnet"
    paper = "Peng et al., ICCV 2019 (arXiv:1812.01754); classes and transforms of FedBN"
    what = "Objects in six styles; by default FedBN's ten classes of the 345."
    home = "http://ai.bu.edu/M3SDA/"
    licence = "fair use, for non-commercial research"
    layout = (
        "domainnet/<domain>/<class>/*.jpg   "
        "with the domains clipart, infograph, painting, quickdraw, real, sketch\n"
        "domainnet/<domain>_{train,test}.txt   the authors' lists, if you have them\n"
        "domainnet/splits/<domain>_{train,test}.txt   these lists, or FedBN's as text: they go first"
    )
    folders = ("domainnet", "DomainNet", "domain_net")
    domains = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    more_classes = True
    num_classes = 10
    sizes = {"clipart": 2629, "infograph": 3283, "painting": 3091, "quickdraw": 5000, "real": 6081, "sketch": 2767}
    transforms = FEDBN
    subsets = {
        "fedbn": partial(equal_shares, train=0.05, validation=0.05, test=0.2),
        "greg": partial(equal_shares, train=0.3, validation=0.1, test=0.2),
        "fedcoda": partial(by_shares, validation=0, test=0.2, official=False),
    }
    listed_subsets = ("fedbn", "greg")
    scan_options = ("classes",)

    size: Count = 256
    classes: str | Sequence[str] = "fedbn"
    subset: Literal["fedbn", "greg", "fedcoda"] | None = None

    def published_sizes(self) -> Sizes:
        return super().published_sizes() if self.classes == "fedbn" else ALL_SIZES if self.classes == "all" else {}

    def classes_read(self, root: Path) -> Sequence[str]:
        """FedBN's ten (`fedbn`), those with the most images (`top-100`), `all`, or a list."""
        folders = [folder for domain in self.domains for folder in visible_folders(root / domain)]
        present = sorted({folder.name for folder in folders})
        if self.classes == "fedbn":
            return TEN
        if self.classes == "all":
            return present
        if isinstance(self.classes, str) and self.classes.startswith("top-") and self.classes[4:].isdigit():
            count = int(self.classes[4:])
            if not 1 <= count <= len(present):
                raise DataError(
                    f"classes is '{self.classes}', but there are {len(present)} classes: give a number up to that."
                )
            sizes: Counter[str] = Counter()
            for folder in folders:
                sizes[folder.name] += len(images_in(folder))
            return sorted(sorted(present, key=lambda label: (-sizes[label], label))[:count])
        for label in names(self.classes):
            if label not in present:
                raise DataError(
                    f"DomainNet has no class '{label}': {nearest(label, [*present, 'fedbn', 'all', 'top-100'])}"
                )
        return names(self.classes)

    def lists(self, root: Path, domain: str, position: Mapping[str, int]) -> Parts | None:
        # The authors' lists lie beside the domains or in splits/, and name all 345 classes.
        place = root / "splits" if (root / "splits" / f"{domain}_train.txt").is_file() else root
        return read_lists(place, domain, position, classes={class_of(path) for path in position})

    def split(self, domains: Mapping[str, Domain]) -> dict[str, Parts]:
        if self.subset in self.listed_subsets:
            lists = [self.folder() / "splits" / f"{domain}_train.txt" for domain in domains]
            if not all(map(is_of_fedbn, lists)):
                domains = {name: replace(domain, official=None) for name, domain in domains.items()}
        return super().split(domains)


def is_of_fedbn(file: Path) -> bool:
    """FedBN's lists name its ten classes and no other; the authors' lists go by the same names."""
    named = {class_of(line) for line in read_lines(file).values()} if file.is_file() else set()
    return bool(named) and named <= set(TEN)
