"""What the book needs beyond MkDocs: formulas as MathML, notebooks and CONTRIBUTING.md as pages. A hook of mkdocs.yml.

All of it is done while the book is built, so that its pages ask no other host for anything, and open from a disk too.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import re
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
BARS = re.compile(r"(?<!\\left)(?<!\\right)\\([lr])Vert(?![A-Za-z])")
SIDES = {"l": r"\left\lVert ", "r": r"\right\rVert "}
LETTERS = {"script": "SCRIPT", "double-struck": "DOUBLE-STRUCK"}
LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CONTRIBUTING = "contributing.md"
outputs: dict[str, list[str]] = {}  # by page; put in last, so that the search does not read figures


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page for each notebook, beside the file itself, which can be downloaded; and one for CONTRIBUTING.md."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = file.src_uri.replace(".ipynb", ".md")
            text, outputs[page] = notebook(json.loads(file.content_string), Path(file.src_uri).name)
            files.append(File.generated(config, page, content=text))
    text = (Path(config.config_file_path).parent / "CONTRIBUTING.md").read_text()
    files.append(File.generated(config, CONTRIBUTING, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to notebooks and to CONTRIBUTING.md, as the repository has them, lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+CONTRIBUTING\.md", f"]({up}{CONTRIBUTING}", markdown)
    return re.sub(r"\]\(([\w./-]+)\.ipynb\)", r"](\1.md)", markdown)


def on_page_content(content: str, **_: object) -> str:
    return FORMULA.sub(lambda found: mathml(found[2], block=found[1] == "div"), content)


def on_post_page(output: str, page: Page, **_: object) -> str:
    for number, shown in enumerate(outputs.get(page.file.src_uri, ())):
        output = output.replace(place(number), shown)
    return output


def mathml(tex: str, block: bool) -> str:
    """A formula as MathML; a wide one scrolls by itself.

    >>> mathml(r"\\mu_g", block=False)
    '<math display="inline"><mrow><msub><mi>μ</mi><mi>g</mi></msub></mrow></math>'
    """
    tex = BARS.sub(lambda side: SIDES[side[1]], html.unescape(tex))
    try:
        tree = ElementTree.fromstring(convert(tex, xmlns="", display="block" if block else "inline"))
    except Exception as error:  # it has many kinds, and what it cannot do may also be no XML
        raise PluginError(f"latex2mathml cannot set this formula; write it otherwise: {tex}") from error
    for node in list(tree.iter()):
        tidy(node)
    if wrong := [text for text in tree.itertext() if "\\" in text]:
        raise PluginError(f"latex2mathml does not know {wrong[0]}; write this formula otherwise: {tex}")
    made = ElementTree.tostring(tree, encoding="unicode")
    return f'<div class="formula">{made}</div>' if block else made


def tidy(node: ElementTree.Element) -> None:
    """What browsers need otherwise than latex2mathml writes it."""
    text, first = node.text or "", node[0] if len(node) else None
    if letters := LETTERS.get(node.get("mathvariant", "")):  # browsers know this attribute no more
        node.text = letter(text, letters)
        del node.attrib["mathvariant"]
    elif node.tag == "mi" and text == "~":
        node.tag, node.text = "mo", "∼"
    elif node.tag == "mi" and "Α" <= text <= "Ω":  # Greek capitals are upright, as TeX sets them
        node.set("mathvariant", "normal")
    elif node.tag == "mi" and text == "log":
        node.tag = "mo"
        node.attrib |= {"form": "prefix", "lspace": "0", "rspace": "0.1667em"}
    elif node.tag == "mo" and text in ("max", "min"):
        node.attrib |= {"form": "prefix", "lspace": "0.1667em", "rspace": "0"}
    elif node.tag == "mo" and text == "|" and node.get("fence") is None:
        node.attrib |= {"lspace": "0", "rspace": "0"}
    elif node.tag in LIMITS and first is not None and first.text == "∑":  # beside it in the text, as TeX has it
        node.tag = LIMITS[node.tag]


def letter(plain: str, alphabet: str) -> str:
    for name in (f"MATHEMATICAL {alphabet} CAPITAL {plain}", f"{alphabet} CAPITAL {plain}"):
        with contextlib.suppress(KeyError):
            return unicodedata.lookup(name)
    return plain


def notebook(document: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """A notebook as Markdown, with places for what its cells put out, and that."""
    parts, shown = [], []
    for cell in document["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            language = "sh" if source.startswith(("!", "%%sh\n")) else "python"
            source = source.removeprefix("%%sh\n")
            parts.append(f"````{language}\n{source}\n````")
            for output in filter(None, map(as_html, cell["outputs"])):
                parts.append(place(len(shown)))
                shown.append(f'<div class="output">{output}</div>')
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f'{title}\n\n<p class="download"><a href="{name}" download>Download this notebook</a></p>\n{rest}', shown


def place(number: int) -> str:
    return f'<div id="output-{number}"></div>'


def as_html(output: dict[str, Any]) -> str:
    """What a cell put out, as it was kept: a figure, a table or text; nothing that needs a script."""
    if output["output_type"] == "stream":
        return text_as_html("".join(output["text"])) if output["name"] == "stdout" else ""
    if output["output_type"] == "error":
        return text_as_html("\n".join(output["traceback"]))
    data = {kind: "".join(content) for kind, content in output["data"].items() if not kind.endswith("json")}
    if svg := data.get("image/svg+xml"):  # as an image of its own: names inside one figure must not meet another's
        return image("svg+xml", base64.b64encode(svg.encode()).decode())
    if png := data.get("image/png"):
        return image("png", png.replace("\n", ""))
    if "text/html" in data and "<script" not in data["text/html"]:
        return data["text/html"]
    return text_as_html(data.get("text/plain", ""))


def image(kind: str, encoded: str) -> str:
    return f'<img src="data:image/{kind};base64,{encoded}" alt="the figure that the cell above draws">'


def text_as_html(text: str) -> str:
    text = COLOURS.sub("", text).strip("\n")
    return f"<pre>{html.escape(text)}</pre>" if text.strip() else ""
