"""Data sets in `<domain>/<class>/`: PACS, VLCS, Office-Caltech-10 and DomainNet."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fedkeel.data.dataset import Domain, Parts, split_domain
from fedkeel.data.formats.folders import class_images, images_in, visible_folders
from fedkeel.data.formats.lists import class_of, read_lines, read_lists, split_lists
from fedkeel.data.reader import FEDBN, TreeReader, published
from fedkeel.data.splits import NOTHING, by_shares, equal_shares
from fedkeel.errors import DataError, nearest
from fedkeel.options import Count
from fedkeel.spec import names

KFOLD = "Train val splits and h5py files pre-read"
# FedDG-GA's (Zhang et al., CVPR 2023).
FEDDG_GA = "resized-crop(scale=(0.7, 1.0))+flip+jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4)"
FEDDG_GA += "+grayscale(p=0.1)+normalise(like=imagenet)"
EIGHTY_TWENTY = partial(by_shares, validation=0, test=0.2, official=False)


@published
@dataclass(frozen=True)
class PACS(TreeReader):
    """PACS: 9,991 images of 7 classes in photo, art painting, cartoon and sketch.

    `subset="greg"` takes 584 / 233 images of each domain to train / validate and tests on 30 %, with FedBN's
    transforms and size (256, else 224); `subset="fedcoda"` splits 80 / 20. `crossval` says what the authors'
    cross-validation lists are used for, "validation" or "test"; "unused" leaves all of their lists aside. Their test
    list is the whole domain: `unseen=sketch` tests on exactly that.
    """

    name = "pacs"
    paper = "Li et al., ICCV 2017 (arXiv:1710.03077)"
    home = "https://domaingeneralization.github.io"
    licence = "none stated; for research"
    layout = (
        "pacs/<domain>/<class>/*.jpg   with the domains art_painting, cartoon, photo, sketch\n"
        "pacs/<domain>_{train,crossval,test}_kfold.txt   the authors' lists, if you have them: to hold a domain out\n"
        "with unseen=sketch; without that take pacs(crossval=test), or pacs(crossval=unused) for a split of your own"
    )
    folders = ("pacs", "PACS")
    inside = ("kfold", "images")
    class_names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    sizes = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    transforms = (FEDDG_GA, "normalise(like=imagenet)")
    subsets = {
        "greg": partial(equal_shares, train=0.5, validation=0.2, test=0.3, official=False),
        "fedcoda": EIGHTY_TWENTY,
    }

    size: Count | None = None
    subset: Literal["greg", "fedcoda"] | None = None
    crossval: Literal["validation", "test", "unused"] = "validation"

    def lists(self, root: Path, domain: str, position: Mapping[str, int]) -> Parts | None:
        above = root.parent if root.name in self.inside else root
        places = (root, above, above / "splits", above / KFOLD)
        place = next((place for place in places if (place / f"{domain}_train_kfold.txt").is_file()), None)
        if place is None or self.crossval == "unused":
            return super().lists(root, domain, position)
        files = {use: place / f"{domain}_{use}_kfold.txt" for use in ("train", "crossval")}
        train, crossval = read_lists(files, domain, position) or (NOTHING, NOTHING)
        return (train, crossval, NOTHING) if self.crossval == "validation" else (train, NOTHING, crossval)

    def pixels(self) -> int:
        return self.size or (256 if self.subset == "greg" else 224)

    def usual_transforms(self) -> tuple[str, str]:
        return FEDBN if self.subset == "greg" else self.transforms


@published
@dataclass(frozen=True)
class VLCS(TreeReader):
    """VLCS: 10,729 photographs of 5 classes from Caltech101, LabelMe, SUN09 and VOC2007.

    `subset="greg"` takes 297 / 297 images of each domain to train / validate, and tests on 30 %.
    """

    name = "vlcs"
    paper = "Fang et al., ICCV 2013; transforms of FedBN, as in GReg"
    home = "https://github.com/facebookresearch/DomainBed"
    licence = "none stated; for research"
    layout = (
        "VLCS/<domain>/<class>/*.jpg   with the domains Caltech101, LabelMe, SUN09, VOC2007\n"
        "or VLCS/<domain>/{train,crossval,test}/<0 to 4>/*.jpg   with CALTECH, LABELME, SUN, PASCAL"
    )
    folders = ("vlcs", "VLCS")
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
        if not (folder / "train").is_dir():
            return super().scan_domain(folder, domain, classes)
        # A class may be absent from the smallest part: only the training images must have all.
        parts = (
            [class_images(self.name, self.require(folder / use), tuple("01234"), needed=use == "train")]
            for use in ("train", "test", "crossval")
        )
        return split_domain(*parts)


@published
@dataclass(frozen=True)
class OfficeCaltech10(TreeReader):
    """Office-Caltech-10: 2,533 images of 10 classes in amazon, caltech, dslr and webcam.

    `subset="fedbn"` takes what FedBN takes of its training lists: half of the smallest one for training (the first
    62 of each) and 40 % of it for validation (the last 50).
    """

    name = "office-caltech-10"
    paper = "Gong et al., CVPR 2012; transforms and lists of FedBN"
    home = "https://github.com/med-air/FedBN"
    licence = "none stated; for research"
    layout = (
        "office_caltech_10/<domain>/<class>/*.jpg   with the domains amazon, caltech, dslr, webcam\n"
        "office_caltech_10/splits/<domain>_{train,test}.txt   FedBN's lists as text, if you have them"
    )
    folders = ("office-caltech-10", "office_caltech_10")
    aliases = {"Caltech10": "caltech"}
    class_names = (
        "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug",
        "projector",
    )  # fmt: skip
    sizes = {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295}
    transforms = FEDBN
    subsets = {"fedbn": partial(equal_shares, train=0.5, validation=0.4, test=0.2)}
    listed_subsets = ("fedbn",)

    size: Count = 256
    subset: Literal["fedbn"] | None = None


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
    home = "http://ai.bu.edu/M3SDA/"
    licence = "fair use, for non-commercial research"
    layout = (
        "domainnet/<domain>/<class>/*.jpg   "
        "with the domains clipart, infograph, painting, quickdraw, real, sketch\n"
        "domainnet/<domain>_{train,test}.txt   the authors' lists, if you have them\n"
        "domainnet/splits/<domain>_{train,test}.txt   these lists, or FedBN's as text: they go first"
    )
    folders = ("domainnet", "DomainNet", "domain_net")
    class_names = (
        "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
    )  # fmt: skip
    sizes = {"clipart": 2629, "infograph": 3283, "painting": 3091, "quickdraw": 5000, "real": 6081, "sketch": 2767}
    transforms = FEDBN
    subsets = {
        "fedbn": partial(equal_shares, train=0.05, validation=0.05, test=0.2),
        "greg": partial(equal_shares, train=0.3, validation=0.1, test=0.2),
        "fedcoda": EIGHTY_TWENTY,
    }
    listed_subsets = ("fedbn", "greg")
    more_classes = True

    size: Count = 256
    classes: str | Sequence[str] = "fedbn"
    subset: Literal["fedbn", "greg", "fedcoda"] | None = None

    def classes_read(self, root: Path) -> Sequence[str]:
        """FedBN's ten (`fedbn`), those with the most images (`top-100`), `all`, or a list."""
        if self.classes == "fedbn":
            return self.class_names
        folders = [folder for domain in self.sizes for folder in visible_folders(root / domain)]
        present = sorted({folder.name for folder in folders})
        if self.classes == "all":
            return present
        if isinstance(self.classes, str) and self.classes.startswith("top-") and self.classes[4:].isdigit():
            counts: Counter[str] = Counter()
            for folder in folders:
                counts[folder.name] += len(images_in(folder))
            return sorted(sorted(present, key=lambda label: (-counts[label], label))[: int(self.classes[4:])])
        for label in names(self.classes):
            if label not in present:
                known = nearest(label, [*present, "fedbn", "all", "top-100"])
                raise DataError(f"DomainNet has no class '{label}': {known}")
        return names(self.classes)

    def lists(self, root: Path, domain: str, position: Mapping[str, int]) -> Parts | None:
        # The authors' lists lie beside the domains or in splits/, and name all 345 classes.
        place = root / "splits" if (root / "splits" / f"{domain}_train.txt").is_file() else root
        return split_lists(place, domain, position, classes={class_of(path) for path in position})

    def split(self, domains: Mapping[str, Domain]) -> dict[str, Parts]:
        if self.subset in self.listed_subsets:
            # FedBN's lists name its ten classes and no other; the authors' lists go by the same names.
            files = [self.folder() / "splits" / f"{domain}_train.txt" for domain in domains]
            lines = [read_lines(file).values() if file.is_file() else () for file in files]
            if not all(own and {*map(class_of, own)} <= {*self.class_names} for own in lines):
                domains = {name: replace(domain, official=None) for name, domain in domains.items()}
        return super().split(domains)
