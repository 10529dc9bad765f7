"""A fingerprint of code changes with what the code does, and with nothing else."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedkeel import methods
from fedkeel.runs.bytecode import code_digest, is_followed
from tests import tiny

METHOD = """
from fedkeel.core.method import Method

SCALE = {scale}
TABLE = {{"a": {entry}}}
seen = []

def helper(x):
    {comment}
    return x * {factor}

class Mine(Method):
    '''{documentation}'''
    rate = {rate}

    def gradients(self, client, recompute):
        '''{documentation}'''
        if client.name in {{"a", "b", "c", "d"}}:
            seen.append(client.name)
        for p in client.model.parameters():
            p.grad = helper(p.grad) * SCALE * TABLE["a"] * self.rate {operator} (lambda: {inner})()

    @property
    def half(self):
        return {half}
"""
PLAIN: dict[str, Any] = {
    "scale": 1.0, "entry": 1, "factor": 1, "rate": 0.5, "operator": "+", "inner": 3, "half": 2,
    "comment": "pass", "documentation": "What it does.",
}  # fmt: skip


def made(**changes: Any) -> Any:
    """A class as a person types it into a notebook: there is no file to read it from."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(METHOD.format(**PLAIN | changes), namespace)
    return namespace["Mine"]


@pytest.mark.parametrize("what", ["scale", "entry", "factor", "rate", "inner", "half"])
def test_what_the_code_does_is_in_it_however_far_away(what: str) -> None:
    assert code_digest(made(**{what: 7})) != code_digest(made())
    assert code_digest(made(operator="-")) != code_digest(made())


def test_comments_documentation_and_places_are_not() -> None:
    same = made(comment="# a comment\n    pass", documentation="Something else.\n\n  Much longer.")
    assert code_digest(same) == code_digest(made())


def test_a_name_elsewhere_in_a_notebook_is_not_that_of_an_attribute() -> None:
    """`self.run` is not the `run` of a later cell."""
    namespace: dict[str, Any] = {"__name__": "__main__", "factor": 2}
    exec("def outer(self):\n    return [self.run, [run.steps * factor for run in self.model]]", namespace)
    before = code_digest(namespace["outer"])
    for name in ("run", "model", "steps"):
        namespace[name] = 3
    assert code_digest(namespace["outer"]) == before
    namespace["factor"] = 3
    assert code_digest(namespace["outer"]) != before


def test_a_list_that_grows_while_it_is_used_is_not_a_change() -> None:
    mine = made()
    before = code_digest(mine)
    mine.gradients.__globals__["seen"].append("a")
    assert code_digest(mine) == before


WRAPPED = """
import functools
from types import SimpleNamespace
import numpy as np

class Rule:
    def __init__(self, factor):
        self.factor = factor
        self.seen = []
    def __call__(self, x):
        return x * self.factor {operator} {inside}

def scaled(by, x):
    return x * by

@functools.cache
def cached():
    return {cached}

half = functools.partial(scaled, {bound})
called = Rule(1).__call__
rule = Rule({filled})
RULE = Rule({factor})
ARRAY = np.full(3, {array})
SETTINGS = SimpleNamespace(rate={rate})

def formula(x):
    return half(x) + cached() + called(x) + rule(x) + RULE(x) + ARRAY[0] * SETTINGS.rate
"""
FIRST: dict[str, Any] = {
    "operator": "+",
    "inside": 5,
    "cached": 1,
    "bound": 0.5,
    "filled": 1,
    "factor": 2,
    "array": 1.5,
    "rate": 0.1,
}


def formula(**changes: Any) -> Any:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(WRAPPED.format(**FIRST | changes), namespace)
    return namespace["formula"]


@pytest.mark.parametrize("what", ["inside", "cached", "bound", "factor", "array", "rate"])
def test_what_is_wrapped_bound_or_inside_of_an_object_in_capitals_counts(what: str) -> None:
    assert code_digest(formula(**{what: 7})) != code_digest(formula())


def test_what_an_object_gathers_while_it_is_used_is_not_a_change() -> None:
    mine = formula()
    mine.__globals__["RULE"].seen.append(3)
    assert code_digest(mine) == code_digest(formula()) == code_digest(formula(filled=9))


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_formulas", "my_method"):
        sys.modules.pop(name, None)


def test_a_helper_in_another_file_of_the_user_s_counts(own_module: Path) -> None:
    (own_module / "my_method.py").write_text(
        "import my_formulas\nfrom fedkeel.core.method import Method\n"
        "class Mine(Method):\n    def loss(self, client, batch, output):\n        return my_formulas.term(output)\n"
    )
    found = []
    for number in (1, 2):
        (own_module / "my_formulas.py").write_text(f"def term(output):\n    return {number} + {'0 * ' * number}1\n")
        for name in ("my_formulas", "my_method"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        found.append(code_digest(importlib.import_module("my_method").Mine))
    assert found[0] != found[1]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "greg", "hbn", "scaffold", "fedcoda", "univarfl", "fedbn"])
def test_the_methods_have_fingerprints_of_their_own(method: str) -> None:
    part = methods.build(method)
    assert code_digest(type(part)) == code_digest(type(part))
    assert code_digest(type(part)) != code_digest(type(methods.build("fedfn")))


def test_a_formula_of_the_package_counts_for_the_methods_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    greg, prox = type(methods.build("greg")), type(methods.build("fedprox"))
    before = code_digest(greg), code_digest(prox)
    monkeypatch.setattr(sys.modules[greg.__module__], "consistency_kl", lambda a, _: a.sum() * 0)
    assert code_digest(greg) != before[0]
    assert code_digest(prox) == before[1]


@pytest.mark.slow
def test_it_is_the_same_in_every_process() -> None:
    """Sets have another order in each, unless it is told which."""
    code = (
        "from fedkeel import methods; from fedkeel.runs.bytecode import code_digest;"
        "from fedkeel.runs.origin import model_digest;"
        "from tests import tiny; from tests.runs.test_bytecode import made;"
        "print(code_digest(made()), *(code_digest(type(methods.build(m))) for m in ('greg', 'hbn', 'fedcoda')),"
        "model_digest(tiny.model()))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(set(said[0].split())) == 5


def test_what_is_python_s_or_installed_is_not_followed() -> None:
    assert [
        is_followed(name) for name in ("torch.nn", "json", "numpy", "fedkeel.formulas.losses", "__main__", "tests.tiny")
    ] == [*(False, False, False, True, True, True)]


def test_a_model_s_fingerprint_is_of_its_layers_and_not_of_its_weights() -> None:
    from fedkeel.runs.origin import model_digest

    assert model_digest(tiny.model(seed=1)) == model_digest(tiny.model(seed=2))
    assert len({model_digest(tiny.model(**given)) for given in ({}, {"width": 5}, {"norm": False})}) == 3


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Any) -> Any:
        return x * self.scale


def test_a_setting_that_a_network_s_repr_does_not_show_is_in_its_fingerprint() -> None:
    from fedkeel.runs.origin import model_digest

    assert model_digest(nn.Sequential(Scaled(1.0))) != model_digest(nn.Sequential(Scaled(2.0)))
    assert model_digest(nn.Sequential(Scaled(1.0))) == model_digest(nn.Sequential(Scaled(1.0)).eval())
