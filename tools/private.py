"""No private name of a dependency is imported or read, and nothing of another package is assigned to.

python tools/private.py        # prints each place, and exits with 1 if there is one
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "fedkeel"
# Modules of dependencies that have no underscore and that their documentation does not show.
UNDOCUMENTED = ("flwr.supercore", "flwr.superlink", "flwr.supernode", "flwr.proto", "flwr.common", "nvflare.private")
EXCEPTIONS = {
    "torch._foreach_*": "arithmetic on lists of tensors, which torch.optim's own documentation calls foreach",
    "torch._fused_sgd_": "torch.optim.SGD(fused=True) imports a compiler, which takes two seconds",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_excepted(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return name == "os._exit"  # documented, and called so because it leaves at once
    return name == "torch._fused_sgd_" or name.startswith("torch._foreach_")


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; nothing for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return [*inner, node.attr] if inner else []
    return [node.id] if isinstance(node, ast.Name) else []


def imported(tree: ast.Module) -> dict[str, str]:
    """What each name stands for that an import of another package binds."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: whole for name, whole in bound.items() if whole.partition(".")[0] not in ("fedkeel", "__future__")}


def problems(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bound = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            whole = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            for name in whole:
                foreign = name.partition(".")[0] not in ("fedkeel", "__future__")
                if foreign and (any(map(is_private, name.split("."))) or name.startswith(UNDOCUMENTED)):
                    yield node.lineno, f"imports {name}"
        elif isinstance(node, ast.Attribute):
            names = dotted(node)
            if not names or names[0] not in bound:
                continue
            name = ".".join([bound[names[0]], *names[1:]])
            if is_private(node.attr) and not is_excepted(name):
                yield node.lineno, f"reads {name}"
            if isinstance(node.ctx, ast.Store) and len(names) == 2 and name != "os.environ":  # which is a |= there
                yield node.lineno, f"assigns to {name}"


def main() -> int:
    found = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for line, what in problems(path):
            found += 1
            print(f"{place}:{line} {what}, which is not public")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
