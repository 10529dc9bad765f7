"""PACS (Li et al., ICCV 2017): photos, art paintings, cartoons and sketches of seven things.

The authors' lists `<domain>_{train,crossval,test}_kfold.txt` are used where they lie beside the images. Their test
list is the whole domain, for the protocol that leaves one domain out: `unseen=sketch` tests on exactly that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fedkeel.data.dataset import Parts
from fedkeel.data.formats.lists import read_split
from fedkeel.data.reader import FEDBN, TreeReader, published
from fedkeel.data.splits import NOTHING, by_shares, equal_shares
from fedkeel.options import Count

LISTS = "Train val splits and h5py files pre-read"
# FedDG-GA's (Zhang et al., CVPR 2023).
TRAIN = "resized-crop(scale=(0.7, 1.0))+flip+jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4)"
TRAIN += "+grayscale(p=0.1)+normalise(like=imagenet)"


@published
@dataclass(frozen=True)
class PACS(TreeReader):
    """PACS: 9,991 images of 7 classes in photo, art painting, cartoon and sketch.

    `subset="greg"` takes 584 / 233 images of each domain to train / validate and tests on 30 %, with FedBN's
    transforms and size (256, else 224); `subset="fedcoda"` splits 80 / 20. `crossval` says what the authors'
    cross-validation lists are used for, "validation" or "test"; "unused" leaves all of their lists aside.
    """

    name = "pacs"
    paper = "Li et al., ICCV 2017 (arXiv:1710.03077)"
    what = "Seven things in four styles, 227 px: the usual data set of domain generalisation."
    home = "https://domaingeneralization.github.io"
    licence = "none stated; for research"
    layout = (
        "pacs/<domain>/<class>/*.jpg   with the domains art_painting, cartoon, photo, sketch\n"
        "pacs/<domain>_{train,crossval,test}_kfold.txt   the authors' lists, if you have them: to hold a domain out\n"
        "with unseen=sketch; without that take pacs(crossval=test), or pacs(crossval=unused) for a split of your own"
    )
    folders = ("pacs", "PACS")
    inside = ("kfold", "images")
    domains = ("art_painting", "cartoon", "photo", "sketch")
    beside = ("kfold", LISTS)
    class_names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    sizes = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    transforms = (TRAIN, "normalise(like=imagenet)")
    subsets = {
        "greg": partial(equal_shares, train=0.5, validation=0.2, test=0.3, official=False),
        "fedcoda": partial(by_shares, validation=0, test=0.2, official=False),
    }
    scan_options = ("crossval",)

    size: Count | None = None
    subset: Literal["greg", "fedcoda"] | None = None
    crossval: Literal["validation", "test", "unused"] = "validation"

    def lists(self, root: Path, domain: str, position: Mapping[str, int]) -> Parts | None:
        above = root.parent if root.name in self.inside else root
        places = (root, above, above / "splits", above / LISTS)
        place = next((place for place in places if (place / f"{domain}_train_kfold.txt").is_file()), None)
        if place is None or self.crossval == "unused":
            return super().lists(root, domain, position)
        files = {use: place / f"{domain}_{use}_kfold.txt" for use in ("train", "crossval")}
        train, crossval = read_split(files, domain, position) or (NOTHING, NOTHING)
        return (train, crossval, NOTHING) if self.crossval == "validation" else (train, NOTHING, crossval)

    def pixels(self) -> int:
        return self.size or (256 if self.subset == "greg" else 224)

    def usual_transforms(self) -> tuple[str, str]:
        return FEDBN if self.subset == "greg" else self.transforms
