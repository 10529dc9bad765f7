"""STL-10 (Coates et al., AISTATS 2011): ten classes of 96 px photographs in the authors' binary files."""

from dataclasses import dataclass
from pathlib import Path

from fedkeel.data.dataset import Findings, Images, Manifest, split_domain
from fedkeel.data.formats.arrays import stl_images
from fedkeel.data.reader import Reader, published
from fedkeel.options import Count


@published
@dataclass(frozen=True)
class STL10(Reader):
    """STL-10: 5,000 + 8,000 images of 10 classes, one domain, with the official test set.

    `validation` is a share of the training set, none by default: UniVarFL takes 0.1.
    """

    name = "stl10"
    paper = "Coates et al., AISTATS 2011; transforms of FedUV"
    what = "Ten classes of 96 px photographs, one domain; its unlabelled images are not used."
    home = "https://cs.stanford.edu/~acoates/stl10/"
    licence = "as ImageNet, from which it is taken: for research"
    layout = "stl10_binary/{train,test}_{X,y}.bin   the binary version"
    folders = ("stl10", "stl10_binary", "STL10", "stl-10")
    inside = ("stl10_binary",)
    class_names = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
    sizes = {"stl10": {"train": 5000, "test": 8000}}
    transforms = ("crop(padding=4)+flip+normalise", "normalise")

    size: Count = 96

    def scan(self, root: Path, findings: Findings) -> Manifest:
        parts: dict[str, list[Images]] = {"train": [], "test": []}
        for use, part in parts.items():
            files = [root / f"{use}_X.bin", root / f"{use}_y.bin"]
            for file in files:
                if not file.is_file():
                    findings.missing(
                        f"'{file}' is missing: stl10 needs train_X.bin, train_y.bin, test_X.bin, test_y.bin."
                    )
            if all(file.is_file() for file in files):
                with findings.part():
                    part.append(stl_images(f"stl10-{use}", *files))
        return Manifest(self.name, root, self.class_names, {"stl10": split_domain(**parts)})
