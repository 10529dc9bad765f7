"""Digits-DG (Zhou et al., ECCV 2020): four sets of digits, drawn down to 600 images of each digit; FedCoda's Digits."""

from dataclasses import dataclass
from pathlib import Path

from fedkeel.data.dataset import Manifest, split_domain
from fedkeel.data.formats.folders import tell_strange_folders
from fedkeel.data.reader import Reader, published
from fedkeel.data.readers.digits_five import DIGITS, tree
from fedkeel.errors import DataError
from fedkeel.options import Count

DOMAINS = ("mnist", "mnist_m", "svhn", "syn")


@published
@dataclass(frozen=True)
class DigitsDG(Reader):
    """Digits-DG: 6,000 digits each of MNIST, MNIST-M, SVHN and SynthDigits, with an 80 / 20 split of their own."""

    name = "digits-dg"
    paper = "Zhou et al., ECCV 2020 (arXiv:2007.03304)"
    what = "Four sets of digits with 600 images of each digit, 32 px, split 80 / 20: FedCoda's Digits."
    home = "https://github.com/KaiyangZhou/Dassl.pytorch"
    licence = "as the sets that it is drawn from"
    layout = "digits_dg/<domain>/{train,val}/<digit>/*.jpg   with the domains mnist, mnist_m, svhn, syn"
    folders = ("digits-dg", "digits_dg", "DigitsDG")
    class_names = DIGITS
    sizes = {domain: {"train": 4800, "test": 1200} for domain in DOMAINS}

    size: Count = 32

    def scan(self, root: Path) -> Manifest:
        tell_strange_folders(root, DOMAINS, "domain of digits-dg")
        domains = {}
        for domain in DOMAINS:
            found = tree(self.name, root / domain)
            if not found:
                raise DataError(f"'{root / domain}' lacks train or val: digits-dg has both for every domain.")
            domains[domain] = split_domain(*found)
        return Manifest(self.name, root, self.class_names, domains)
