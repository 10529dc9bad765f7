"""Office-Caltech-10 (Gong et al., CVPR 2012): ten things in a shop's pictures, web pictures, and from two cameras."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from fedkeel.data.reader import FEDBN, TreeReader, published
from fedkeel.data.splits import equal_shares
from fedkeel.options import Count


@published
@dataclass(frozen=True)
class OfficeCaltech10(TreeReader):
    """Office-Caltech-10: 2,533 images of 10 classes in amazon, caltech, dslr and webcam.

    `subset="fedbn"` takes what FedBN takes of its training lists: half of the smallest one for training (the first
    62 of each) and 40 % of it for validation (the last 50).
    """

    name = "office-caltech-10"
    paper = "Gong et al., CVPR 2012; transforms and lists of FedBN"
    what = "The ten classes that Office-31 and Caltech-256 share, in four domains."
    home = "https://github.com/med-air/FedBN"
    licence = "none stated; for research"
    layout = (
        "office_caltech_10/<domain>/<class>/*.jpg   with the domains amazon, caltech, dslr, webcam\n"
        "office_caltech_10/splits/<domain>_{train,test}.txt   FedBN's lists as text, if you have them"
    )
    folders = ("office-caltech-10", "office_caltech_10")
    domains = ("amazon", "caltech", "dslr", "webcam")
    aliases = {"Caltech10": "caltech"}
    class_names = (
        "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug",
        "projector",
    )  # fmt: skip
    sizes = {
        "amazon": {"images": 958, "train": 766, "test": 192},
        "caltech": {"images": 1123, "train": 898, "test": 225},
        "dslr": {"images": 157, "train": 125, "test": 32},
        "webcam": {"images": 295, "train": 236, "test": 59},
    }
    transforms = FEDBN
    subsets = {"fedbn": partial(equal_shares, train=0.5, validation=0.4, test=0.2)}
    listed_subsets = ("fedbn",)

    size: Count = 256
    subset: Literal["fedbn"] | None = None
