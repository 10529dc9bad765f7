"""What the book needs beyond MkDocs: formulas as MathML, notebooks and CONTRIBUTING.md as pages. A hook of mkdocs.yml.

All of it is done while the book is built, so that its pages ask no other host for anything, and open from a disk too.
"""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
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


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to notebooks and to CONTRIBUTING.md, as the repository has them, lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+CONTRIBUTING\.md", f"]({up}{CONTRIBUTING}", markdown)
    return re.sub(r"\]\(([\w./-]+)\.ipynb\)", r"](\1.md)", markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return FORMULA.sub(lambda found: mathml(found[2], block=found[1] == "div"), content)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for number, shown in enumerate(outputs.get(page.file.src_uri, ())):
        output = output.replace(place(number), shown)
    return output


def mathml(tex: str, block: bool) -> str:
    """A formula as MathML; a wide one scrolls by itself.

    >>> mathml(r"\\mu_g", block=False)
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><msub><mi>&#x003BC;</mi><mi>g</mi></msub></mrow></math>'
    """
    made: str = convert(html.unescape(tex), display="block" if block else "inline")
    return f'<div class="formula">{made}</div>' if block else made


def notebook(document: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """A notebook as Markdown, with places for what its cells put out, and that."""
    parts, shown = [], []
    for cell in document["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            language = "sh" if source.startswith(("!", "%%bash", "%%sh")) else "python"
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
