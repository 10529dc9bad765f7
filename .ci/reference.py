"""What mkdocstrings cannot see by itself when it reads the source for the reference. Nothing is imported for it.

- Modules that are imported under another name: `fedkeel.losses` is `fedkeel.formulas.losses`.
- Options that are explained where they stand: by a comment behind a field or a parameter, or by the help text of a
  field of `Config`. They become the "Args" of the class.
- What people type: a method, a transform, a metric ... is registered under a name. Its entry shows the name, and of a
  module that registers something no more than that is shown, and what its `__all__` names.
- Examples stand in docstrings as doctest finds them; a page wants a fence around them.
- A name in backticks becomes a link to where the reference has it, a paper's equation one to its method's page, where
  it is set as a formula.
- Formulas stand in docstrings as one reads them in an editor, `1/K sum_k p_k`; pages have LaTeX, for .ci/book.py.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe

DECORATOR = re.compile(r"(?:register|register_metric|network|diagnostic)\(\s*['\"]([^'\"]+)['\"]")
PAGES = Path(__file__).parents[1] / "docs" / "reference"
EXPLAINED = re.compile(r"^(Args|Attributes):$", re.MULTILINE)
PAPER = re.compile(r"\b(GReg|HBN|FedWon|FedCoda|UniVarFL)(?=, (?:Eqs?\.|Algorithm|Proposition))")
FORMAL = ("fedkeel.formulas.", "fedkeel.nn.")  # what is set apart there is a formula
GREEK = {"alpha", "beta", "gamma", "delta", "Delta", "lambda", "mu", "rho", "sigma", "tau", "theta", "phi", "eps"}
FUNCTIONS = {
    "exp": r"\exp",
    "log": r"\log",
    "max": r"\max",
    "min": r"\min",
    "cos": r"\cos",
    "in": r"\in",
    "sum": r"\sum",
}
SIGNS = {"<=": r"\le", "<-": r"\leftarrow", "!=": r"\ne", " . ": r"\cdot", "*": r"\cdot", "||": r"\|"}
TOKEN = re.compile(
    r"(?P<fraction>\b\d+/(?:\|[^|]+\||\([^()]+\)|[A-Za-z]+(?:_[A-Za-z]+)?(?:\^\w)?|\d+))"
    r"|(?P<small>\b1e-\d+)|(?P<word>[A-Za-z]+)|(?P<script>[_^](?:\{[^{}]*\}|[A-Za-z0-9]+(?:,[a-z])?))"
    r"|(?P<gap>(?<=[\w)]) (?=\w))|(?P<sign><=|<-|!=|\s\.\s|\*|\|\|)|(?P<other>.)"
)
# Public modules under their short names, and where their content lies.
SHORT = {
    "losses": "formulas.losses",
    "aggregation": "formulas.aggregation",
    "state": "core.state",
    "messages": "core.messages",
}
Thing = griffe.Class | griffe.Function | griffe.Attribute


class Reference(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, home in SHORT.items():
            pkg.set_member(name, griffe.Alias(name, pkg[home], parent=pkg))
        for module in modules(pkg):
            for thing in things(module):
                explain_options(thing)
            show_registered(module)
        places = places_of(pkg)
        for module in modules(pkg):
            everything: tuple[griffe.Object, ...] = (module, *things(module))
            for part in everything:
                if part.name.startswith("__") and part.name != "__init__":
                    part.docstring = None  # what has none is not shown
                if part.docstring:
                    text = linked(part, places)
                    part.docstring.value = fenced(with_formulas(text) if part.path.startswith(FORMAL) else text)


def modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from modules(member)


def things(parent: griffe.Object) -> Iterator[Thing]:
    """What is defined there, at any depth, and not imported."""
    for member in parent.members.values():
        if isinstance(member, Thing):
            yield member
            yield from things(member)


# -- links ------------------------------------------------------------------------------------------------------------
def places_of(pkg: griffe.Module) -> dict[str, str]:
    """What the pages have, by full names and, of those that tell something by themselves, by short ones."""
    places: dict[str, str] = {}
    for place in re.findall(
        r"^::: (\S+)", "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md"))), re.MULTILINE
    ):
        found = pkg[place.partition(".")[2]]
        inside = (
            [f"{place}.{name}" for name, part in found.members.items() if part.is_public] if found.is_module else []
        )
        for path in inside or [place]:
            short = path.rpartition(".")[2]
            places |= {path: path, pkg[path.partition(".")[2]].canonical_path: path}
            if short != short.lower() or "_" in short:
                places.setdefault(short, path)
    return places


def linked(thing: griffe.Object, places: Mapping[str, str]) -> str:
    def link(found: re.Match[str]) -> str:
        known = (found[1], f"{thing.module.path}.{found[1]}", f"fedkeel.{found[1]}")
        place = next((places[name] for name in known if name in places), "")
        return f"[{found[0]}][{place}]" if place and place.rpartition(".")[2] != thing.name else found[0]

    def both(line: str) -> str:
        named = re.sub(r"`([\w.]+)`", link, line)
        return PAPER.sub(lambda paper: f"[{paper[0]}](../methods/{paper[0].lower()}.md)", named)

    lines = thing.docstring.value.splitlines() if thing.docstring else []
    return "\n".join(line if line.startswith((">>>", "...")) else both(line) for line in lines)


# -- what people type -------------------------------------------------------------------------------------------------
def registered(thing: Thing) -> str:
    """The name that people type for it, or nothing."""
    decorators = [str(decorator.value) for decorator in getattr(thing, "decorators", ())]
    names = [found.group(1) for text in decorators if (found := DECORATOR.search(text))]
    if "published" in decorators:
        names.append(ast.literal_eval(str(thing["name"].value)))
    return names[0] if names else ""


def show_registered(module: griffe.Module) -> None:
    own = [thing for thing in things(module) if thing.parent is module]
    if not any(map(registered, own)):
        return
    for thing in own:
        name = registered(thing)
        thing.public = bool(name) or thing.name in (module.exports or ())
        if name and thing.docstring:
            thing.docstring.value = f"By name: `{name}`.\n\n{thing.docstring.value}"
            for part in things(thing):
                part.public = False  # hooks, which the engine calls


# -- options ----------------------------------------------------------------------------------------------------------
@cache
def comments_of(module: griffe.Module) -> dict[int, str]:
    """The comments that stand behind code, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(Path(str(module.filepath)).read_text()).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    behind = [token for token in found if token.line[: token.start[1]].strip() and "# type:" not in token.string]
    return {token.start[0]: token.string.removeprefix("#").strip() for token in behind}


def explain_options(thing: Thing) -> None:
    if isinstance(thing, griffe.Attribute) or not thing.docstring or EXPLAINED.search(thing.docstring.value):
        return
    explained: dict[str, str] = {}
    if isinstance(thing, griffe.Class):
        for owner in (*reversed(thing.resolved_bases), thing):  # options may be inherited
            explained |= fields(owner) if isinstance(owner, griffe.Class) and "dataclass" in owner.labels else {}
    maker = thing.members.get("__init__") if isinstance(thing, griffe.Class) else thing
    if isinstance(maker, griffe.Function):
        explained |= parameters(maker)
    if explained:
        options = "\n".join(["Args:", *(f"    {name}: {text}" for name, text in explained.items())])
        before, sign, examples = thing.docstring.value.partition("\n>>> ")
        thing.docstring.value = f"{before.rstrip()}\n\n{options}\n{sign}{examples}"


def fields(thing: griffe.Class) -> dict[str, str]:
    comments, found = comments_of(thing.module), dict[str, str]()
    parameters = {parameter.name: parameter for parameter in getattr(thing, "parameters", ())}
    for name, member in thing.members.items():
        if not isinstance(member, griffe.Attribute) or name.startswith("_") or "ClassVar" in str(member.annotation):
            continue
        if str(member.value).startswith("option("):  # of Config: default, help and heading
            call = ast.parse(str(member.value), mode="eval").body
            assert isinstance(call, ast.Call)
            member.value = ast.unparse(call.args[0])
            if name in parameters:
                parameters[name].default = member.value
            found[name] = ast.literal_eval(call.args[1])
        elif member.annotation and member.endlineno in comments:
            found[name] = comments[member.endlineno]
    return found


def parameters(function: griffe.Function) -> dict[str, str]:
    comments = comments_of(function.module)
    node = ast.parse(dedent("\n".join(function.lines))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    above = (function.lineno or 1) - 1
    # On the line of the function's name a comment is about the function.
    every = [arg for arg in (*node.args.args, *node.args.kwonlyargs) if arg.lineno > node.lineno]
    return {arg.arg: comments[above + arg.lineno] for arg in every if above + arg.lineno in comments}


def fenced(text: str) -> str:
    """Examples as code; what only doctest needs to know goes."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        begins, ends = line.startswith(">>>") and not inside, inside and not line.strip()
        inside = (inside or begins) and not ends
        lines += ["```pycon"] * begins + ["```"] * ends
        lines.append(re.sub(r"\s*# doctest:.*", "", line) if inside else line)
    return "\n".join([*lines, "```"] if inside else lines)


# -- formulas ---------------------------------------------------------------------------------------------------------
def with_formulas(text: str) -> str:
    """Lines that stand apart, indented after an empty one, as display formulas."""
    lines: list[str] = []
    before, inside = "", False
    for line in text.splitlines():
        inside = line.startswith("    ") and (inside or not before.strip()) and bool(lines)
        lines.append(display(line) if inside else line)
        before = line
    return "\n".join(lines)


def display(line: str) -> str:
    """Its parts have some room between them; words in one are no formula, and follow it."""
    number = re.search(r"\(Eq\. (\d+)\)$", line.rstrip())
    parts = re.split(r"\s{4,}", (line[: number.start()] if number else line).strip())
    words = [part for part in parts if re.search(r"\b[a-z]{2,} [a-z]{2,}\b|: [a-z]{3}", part)]
    shown = r" \qquad ".join(tex(part) for part in parts if part not in words)
    mark = rf" \qquad ({number[1]})" if number else ""
    return f"\n$${shown}{mark}$$\n\n{'; '.join(words)}"


def tex(text: str) -> str:
    r"""A formula of a docstring as LaTeX.

    >>> tex("L_HE = 1/n^2 sum_i sqrt(zbar_i . mu)")
    'L_{\\mathrm{HE}} = \\frac{1}{n^{2}}\\;\\sum _{i} \\sqrt{\\bar{z}_{i}\\cdot \\mu }'
    """
    text = text.replace("_hat", "hat")
    if (start := text.find("sqrt(")) >= 0:
        end, depth = start + 5, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        return f"{tex(text[:start])}\\sqrt{{{tex(text[start + 5 : end - 1])}}}{tex(text[end:])}"
    return "".join(one(found) for found in TOKEN.finditer(text))


def one(found: re.Match[str]) -> str:
    token, kind = found[0], found.lastgroup
    if kind == "fraction":
        above, _, below = token.partition("/")
        return f"\\frac{{{above}}}{{{tex(below.strip('()') if below[0] == '(' else below)}}}"
    if kind == "small":
        return f"10^{{-{token.partition('-')[2]}}}"
    if kind == "script":
        inner = token[1:].strip("{}")
        return f"{token[0]}{{{tex(inner) if token[1] == '{' or len(inner) == 1 else word(inner)}}}"
    if kind == "word":
        return word(token)
    if kind == "gap":
        return r"\;"
    return f"{SIGNS[token]} " if kind == "sign" else {"{": r"\{", "}": r"\}"}.get(token, token)


def word(name: str) -> str:
    if accent := re.fullmatch(r"([A-Za-z])(bar|hat|tilde)", name):
        return f"\\{accent[2]}{{{accent[1]}}}"
    if name in GREEK:
        return f"\\{'epsilon' if name == 'eps' else name} "
    if name in FUNCTIONS:
        return f"{FUNCTIONS[name]} "
    return name if len(name) == 1 or "," in name or name.isdigit() else f"\\mathrm{{{name}}}"
