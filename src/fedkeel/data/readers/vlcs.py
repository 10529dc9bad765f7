"""VLCS (Fang et al., ICCV 2013): five classes of photographs from four older data sets.

Two layouts are in use: DomainBed's `<domain>/<class>/`, and `<domain>/{train,crossval,test}/<0 to 4>/`, which has
a split of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fedkeel.data.dataset import Domain, split_domain
from fedkeel.data.formats.folders import class_images
from fedkeel.data.reader import FEDBN, TreeReader, published
from fedkeel.data.splits import equal_shares
from fedkeel.errors import DataError
from fedkeel.options import Count


@published
@dataclass(frozen=True)
class VLCS(TreeReader):
    """VLCS: 10,729 photographs of 5 classes from Caltech101, LabelMe, SUN09 and VOC2007.

    `subset="greg"` takes 297 / 297 images of each domain to train / validate, and tests on 30 %.
    """

    name = "vlcs"
    paper = "Fang et al., ICCV 2013; transforms of FedBN, as in GReg"
    what = "Bird, car, chair, dog and person in the photographs of four data sets."
    home = "https://github.com/facebookresearch/DomainBed"
    licence = "none stated; for research"
    layout = (
        "VLCS/<domain>/<class>/*.jpg   with the domains Caltech101, LabelMe, SUN09, VOC2007\n"
        "or VLCS/<domain>/{train,crossval,test}/<0 to 4>/*.jpg   with CALTECH, LABELME, SUN, PASCAL"
    )
    folders = ("vlcs", "VLCS")
    domains = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
    aliases = {
        "CALTECH": "Caltech101", "LABELME": "LabelMe", "SUN": "SUN09", "PASCAL": "VOC2007",
        "caltech": "Caltech101", "labelme": "LabelMe", "sun": "SUN09", "pascal": "VOC2007",
    }  # fmt: skip
    class_names = ("bird", "car", "chair", "dog", "person")
    sizes = {"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376}
    transforms = FEDBN
    subsets = {"greg": partial(equal_shares, train=0.3, validation=0.3, test=0.3, official=False)}

    size: Count = 256
    subset: Literal["greg"] | None = None

    def scan_domain(self, folder: Path, domain: str, classes: Sequence[str]) -> Domain:
        if not any((folder.parent / name / "train").is_dir() for name in (*self.domains, *self.aliases)):
            return super().scan_domain(folder, domain, classes)
        parts = []
        for use in ("train", "test", "crossval"):
            if not (folder / use).is_dir():
                raise DataError(
                    f"The folder '{folder / use}' of vlcs is missing: every domain needs train, crossval, test."
                )
            # A class may be absent from the smallest part: only the training images must have all.
            parts.append([class_images("vlcs", folder / use, tuple("01234"), needed=use == "train")])
        return split_domain(*parts)
