"""What mkdocstrings cannot see by itself when it reads the source for the reference. Nothing is imported for it.

- Modules that are imported under another name: `fedkeel.losses` is `fedkeel.formulas.losses`.
- Options that are explained where they stand: by a comment behind a field or a parameter, or by the help text of a
  field of `Config`. They become the "Args" of the class.
- What people type: a method, a transform, a metric ... is registered under a name. Its entry shows the name, and of a
  module that registers something no more than that is shown, and what its `__all__` names.
- Examples stand in docstrings as doctest finds them; a page wants a fence around them.
- A name in backticks becomes a link to where the reference has it, a paper's equation one to its method's page, where
  it is set as a formula.
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
Thing = griffe.Class | griffe.Function | griffe.Attribute


class Reference(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for alias, home in ast.literal_eval(str(pkg["_ALIASES"].value)).items():
            name = alias.rpartition(".")[2]
            pkg.set_member(name, griffe.Alias(name, pkg[home.partition(".")[2]], parent=pkg))
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
                    part.docstring.value = fenced(linked(part, places))


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
