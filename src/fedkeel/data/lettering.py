"""Names in a picture: a font that has their letters; for letters that no font here has, others that say the same."""

import importlib.util
import logging
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import ImageFont

from fedkeel.core.naming import visible

log = logging.getLogger("fedkeel")

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
FOLDERS = (
    *("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"),
    *("/System/Library/Fonts", "/Library/Fonts", "C:/Windows/Fonts"),
)
MOST_FILES = 1000  # that are looked into
NO_LETTER = "\U0010ffff"  # a font draws its sign for a missing letter


class Lettering:
    """Draws the given names: `font` to draw with, and `text` makes of a name what that font can draw."""

    def __init__(self, names: Sequence[str], size: int) -> None:
        self.font, self._lacking = choose(sorted(set("".join(map(composed, names)))), size)
        if self._lacking:
            shown = " ".join(sorted(self._lacking)[:10])
            log.warning("No font here has the letters %s: install one that has them, such as Noto Sans.", shown)

    def text(self, name: str) -> str:
        return "".join(self._instead(letter) if letter in self._lacking else letter for letter in composed(name))

    def _instead(self, letter: str) -> str:
        """The letter without its accents, or its number: names that differ still do."""
        plain = "".join(part for part in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(part))
        return plain if plain and all(has(self.font, part) for part in plain) else f"U+{ord(letter):04X}"


def choose(letters: Sequence[str], size: int) -> tuple[Font, set[str]]:
    """Pillow's own font if it has every letter, else the first font that has, else the one that lacks fewest."""
    font: Font = ImageFont.load_default(size=size)
    lacking = {letter for letter in letters if not has(font, letter)}
    for file in font_files() if lacking else ():
        try:
            other = ImageFont.truetype(file, size)
            missing = {letter for letter in letters if not has(other, letter)}
        except OSError:  # not a font after all
            continue
        # One of symbols, or one that has a sign for every alphabet and no letters, draws all alike.
        if len(missing) < len(lacking) and drawn(other, "a") != drawn(other, "b"):
            font, lacking = other, missing
        if not lacking:
            break
    return font, lacking


def composed(name: str) -> str:
    """One line, with an accent and its letter as one."""
    return visible(unicodedata.normalize("NFC", name)).replace("\N{REPLACEMENT CHARACTER}", "?")


def has(font: Font, letter: str) -> bool:
    return letter.isspace() or drawn(font, letter) != drawn(font, NO_LETTER)


def drawn(font: Font, letter: str) -> tuple[object, bytes]:
    mask = font.getmask(letter)
    return mask.size, bytes(mask)


def font_files() -> list[Path]:
    """The fonts of this machine, plain ones without serifs first, and matplotlib's where it is installed."""
    every = [file for folder in folders() for file in folder.rglob("*")]
    files = [file for file in every if file.suffix.lower() in (".ttf", ".otf", ".ttc")]
    # Styles such as bold make names longer.
    return sorted(files, key=lambda file: ("sans" not in file.name.lower(), len(file.stem), str(file)))[:MOST_FILES]


def folders() -> Iterator[Path]:
    yield from (Path(folder).expanduser() for folder in FOLDERS)
    found = importlib.util.find_spec("matplotlib")
    if found is not None and found.origin:
        yield Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
