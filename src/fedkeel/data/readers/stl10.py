"""STL-10 (Coates et al., AISTATS 2011): ten classes of 96 px photographs in the authors' binary files."""

from dataclasses import dataclass
from pathlib import Path

from fedkeel.data.dataset import Manifest, split_domain
from fedkeel.data.formats.arrays import stl_images
from fedkeel.data.reader import Reader, published
from fedkeel.errors import DataError
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

    def scan(self, root: Path) -> Manifest:
        files = {name: root / f"{name}.bin" for name in ("train_X", "train_y", "test_X", "test_y")}
        for file in files.values():
            if not file.is_file():
                raise DataError(f"'{file}' is missing: stl10 needs {', '.join(f'{name}.bin' for name in files)}.")
        train, test = (stl_images(files[f"{use}_X"], files[f"{use}_y"]) for use in ("train", "test"))
        return Manifest(self.name, root, self.class_names, {"stl10": split_domain([train], [test])})
