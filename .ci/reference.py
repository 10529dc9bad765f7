"""What mkdocstrings cannot see by itself when it reads the source for the reference (it imports nothing).

- Modules that are imported under another name: `fedkeel.losses` is `fedkeel.formulas.losses`.
- Options that are explained where they stand: by a comment behind a field or a parameter, or by the help text of a
  field of `Config`. They become the "Args" of the class.
- What people type: a method, a transform, a metric ... is registered under a name. Its page shows the name, and nothing
  of its module that is not registered.
- Examples stand in docstrings as doctest finds them; a page wants a fence around them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any

import griffe

DECORATOR = re.compile(r"(?:register|register_metric|network|diagnostic)\(\s*['\"]([^'\"]+)['\"]")
SECTION = re.compile(r"^(Args|Attributes):$", re.MULTILINE)


class Reference(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for alias, home in ast.literal_eval(str(pkg["_ALIASES"].value)).items():
            name = alias.rpartition(".")[2]
            pkg.set_member(name, griffe.Alias(name, pkg[home.partition(".")[2]], parent=pkg))
        for module in modules(pkg):
            show_registered(module)
            comments = comments_of(module)
            for thing in (module, *things(module)):
                if isinstance(thing, griffe.Class | griffe.Function):
                    explain_options(thing, comments)
                if thing.docstring:
                    thing.docstring.value = fenced(thing.docstring.value)


def modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from modules(member)


def things(parent: griffe.Object) -> Iterator[griffe.Object]:
    """What is defined there, at any depth, and not imported."""
    for member in parent.members.values():
        if isinstance(member, griffe.Class | griffe.Function | griffe.Attribute):
            yield member
            yield from things(member)


def registered(thing: griffe.Object) -> str:
    """The name that people type for it, or nothing."""
    decorators = [str(decorator.value) for decorator in getattr(thing, "decorators", ())]
    names = [found.group(1) for text in decorators if (found := DECORATOR.search(text))]
    if "published" in decorators and "name" in thing.members:
        names.append(ast.literal_eval(str(thing["name"].value)))
    return names[0] if names else ""


def show_registered(module: griffe.Module) -> None:
    own = [thing for thing in things(module) if thing.parent is module]
    if module.exports is not None or not any(map(registered, own)):
        return
    for thing in own:
        thing.public = bool(name := registered(thing))
        for part in things(thing):
            part.public = False  # hooks that are called for the user
        if name:
            summary = thing.docstring.value if thing.docstring else ""
            thing.docstring = griffe.Docstring(f"By name: `{name}`.\n\n{summary}", parent=thing)


def comments_of(module: griffe.Module) -> dict[int, str]:
    """The comments that stand behind code, by line."""
    source = module.filepath.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [(token.start[0], token.string[1:].strip(), token.line) for token in tokens if token.type == tokenize.COMMENT]
    return {line: text for line, text, code in found if not code.lstrip().startswith("#") and "type: ignore" not in text}


def explain_options(thing: griffe.Class | griffe.Function, comments: dict[int, str]) -> None:
    if not thing.docstring or SECTION.search(thing.docstring.value):
        return
    explained = dict(fields(thing, comments) if isinstance(thing, griffe.Class) else ())
    maker = thing.members.get("__init__", thing) if isinstance(thing, griffe.Class) else thing
    if isinstance(maker, griffe.Function):
        explained |= parameters(maker, comments)
    if explained:
        lines = "\n".join(f"    {name}: {text}" for name, text in explained.items())
        before, examples = (thing.docstring.value.split("\n>>> ", 1) + [""])[:2]
        thing.docstring.value = f"{before.rstrip()}\n\nArgs:\n{lines}\n" + (f"\n>>> {examples}" if examples else "")


def fields(thing: griffe.Class, comments: dict[int, str]) -> Iterator[tuple[str, str]]:
    if "dataclass" not in thing.labels:
        return
    for name, member in thing.members.items():
        if not isinstance(member, griffe.Attribute) or name.startswith("_") or "class-attribute" not in member.labels | {""}:
            continue
        call = ast.parse(str(member.value), mode="eval").body if str(member.value).startswith("option(") else None
        if isinstance(call, ast.Call):
            yield name, ast.literal_eval(call.args[1])
        elif member.endlineno in comments:
            yield name, comments[member.endlineno]


def parameters(function: griffe.Function, comments: dict[int, str]) -> dict[str, str]:
    source = "\n".join(function.lines)
    node = ast.parse(re.sub(r"^ {%d}" % (len(source) - len(source.lstrip())), "", source, flags=re.MULTILINE)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if node.args.args and node.args.args[-1].lineno == node.lineno:  # on one line: a comment is about the function
        return {}
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    first = (function.lineno or 1) - 1
    return {arg.arg: comments[first + arg.lineno] for arg in every if first + arg.lineno in comments}


def fenced(text: str) -> str:
    """Examples as code; what only doctest needs to know goes."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            lines += ["```pycon"]
            inside = True
        elif inside and not line.strip():
            lines += ["```"]
            inside = False
        lines.append(re.sub(r"\s*# doctest:.*", "", line) if inside else line)
    return "\n".join([*lines, "```"] if inside else lines)
