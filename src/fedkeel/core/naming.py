"""Names are data, whatever letters they have: as the name of a file, on a terminal and in a table."""

import hashlib
import re
from urllib.parse import unquote

LONGEST = 160  # bytes of a file's name, of the 255 that file systems take: an ending and a temporary name must fit too
UNWELCOME = frozenset('/\\%~:*?"<>|')  # separators, what other systems refuse, and the two signs used here
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # part of the spelling of some languages


def file_name(name: str) -> str:
    """One name of a file or folder for any name, and another one for another: never a path, never hidden or too long.

    Letters of every language stay; what a file's name should not have is written as in an address, `%2F`.

    >>> file_name("Zürich"), file_name("../etc"), file_name("")
    ('Zürich', '%2E.%2Fetc', '%')
    """
    kept = "".join(_percent(c) if c in UNWELCOME or not c.isprintable() else c for c in name)
    # A dot first hides a file, a dot or a blank last is dropped by some systems, a blank first by readers of lists.
    kept = re.sub(r"^[. ]|[. ]$", lambda found: _percent(found[0]), kept) or "%"
    if len(kept.encode()) <= LONGEST:
        return kept
    number = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{kept.encode()[: LONGEST - 17].decode('utf-8', 'ignore')}~{number}"  # no other name has a `~`


def name_of(file: str) -> str:
    """The name that `file_name` made this of; of one that was too long, its beginning."""
    return "" if file == "%" else unquote(file, errors="surrogatepass")


def slug(text: str) -> str:
    """A folder's name from a method or data set as typed, without signs that a shell takes for its own.

    >>> slug("fedprox(mu=0.1)+gn@batch_size=8")
    'fedprox-mu=0.1-+gn@batch_size=8'
    """
    return file_name(re.sub(r"[^\w.+=@-]+", "-", text.replace(" ", "")).strip("-"))


def visible(text: str) -> str:
    """The text without what could move a terminal's cursor, change its colours or pose as another line.

    >>> visible("north\\x1b[31m")
    'north�[31m'
    """
    return "".join(c if c.isprintable() or c in JOINERS else "\N{REPLACEMENT CHARACTER}" for c in text)


def markdown_text(text: str) -> str:
    """Any text as a cell of a Markdown table shows it: no markup, no HTML, no further column.

    >>> markdown_text("a|b <script> *c* art_painting")
    'a\\\\|b &lt;script&gt; \\\\*c\\\\* art_painting'
    """
    shown = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside of a word is no emphasis, and data sets are full of them.
    return re.sub(r"[\\`*|~\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", shown)


def csv_text(text: str) -> str:
    """Any text as a cell of a CSV file: a spreadsheet must not take a name for a formula.

    >>> csv_text("=1+1"), csv_text("photo")
    ("'=1+1", 'photo')
    """
    shown = visible(text)
    return f"'{shown}" if shown.lstrip().startswith(tuple("=+-@＝＋＠")) else shown


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
