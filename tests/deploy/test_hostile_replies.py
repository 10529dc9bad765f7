"""Whatever a site with a key replies, the server finishes its run with the others."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("nvflare", reason="nvflare is not installed")

from nvflare.apis.shareable import Shareable

from fedkeel.core.messages import BadMessage
from fedkeel.deploy.channel import MESSAGE, TABLE, content_of
from fedkeel.engine.executors.sites.channel import Reply, Table
from fedkeel.engine.executors.sites.replies import evaluations_of
from fedkeel.engine.executors.sites.roster import Description, agree
from tests import tiny
from tests.deploy.loop import Loop, over_network, sites_of
from tests.deploy.test_faults import CLINIC, loop_of
from tests.engine.executors.sites.test_roster import site as described

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("FEDKEEL_EXAMPLES", "40"))  # more, for whoever has the time
KINDS = ("describe", "train", "answer", "evaluate")


def over_the_wire(text: str, data: bytes) -> Reply | str:
    """As it comes out of NVFlare's."""
    shareable = Shareable()
    shareable[TABLE], shareable[MESSAGE] = text, data
    try:
        return content_of(shareable)
    except BadMessage as bad:
        return str(bad)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Reply]:
    """What honest sites replied in a round with all kinds of requests."""
    found: dict[tuple[str, str], Reply] = {}
    loop = loop_of(tmp_path_factory.mktemp("honest"))

    def record(node: str, request: Table, reply: Reply) -> Reply:
        found[node, request["do"]] = reply
        return reply

    loop.spoil = record
    over_network(tmp_path_factory.mktemp("run"), "hbn", loop=loop, rounds=1)
    assert {kind for _, kind in found} == set(KINDS)
    return found


class Replay(Loop):
    """Says what was recorded, but for one reply of one site."""

    def __init__(self, recorded: Mapping[tuple[str, str], Reply], kind: str, text: str, data: bytes) -> None:
        super().__init__(sites_of(tiny.federation(), Path("/nowhere"), tiny.model()))
        self.recorded, self.kind, self.bad = recorded, kind, (text, data)

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        for node, request in requests.items():
            hit, told = node == CLINIC and request["do"] == self.kind, request["do"] == "sit out"
            good = ({}, b"") if told else copy.deepcopy(self.recorded[node, request["do"]])
            yield node, over_the_wire(*self.bad) if hit else good


NASTY: list[Any] = [
    None, True, -1, 0, 0.5, 2**63, 10**400, -(10**400), 1e308, math.nan, math.inf, -math.inf, "", "7", "\ud800",
    "\x1b[2J", "[/b]", "x" * 10_000, [], {}, [[]], [0] * 5000, ["a"] * 3, {"a": {"b": [1]}}, "F8_E4M3", "C64",
    [0, 2**62], [65536, 65536], [2**31, 2**31, 2**31], [3, 65536, 65536], "weights//", "../../etc",
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """The same tree with something else in one place, or without it, or with one thing twice."""
    tree = copy.deepcopy(tree)
    path = draw(st.sampled_from(places(tree)))
    value = draw(st.sampled_from([*NASTY, "drop", "twice"]))
    if not path:
        return value
    at = tree
    for key in path[:-1]:
        at = at[key]
    if value == "drop":
        del at[path[-1]]
    elif value == "twice" and isinstance(at, list):
        at.append(copy.deepcopy(at[path[-1]]))
    else:
        at[path[-1]] = value
    return tree


@st.composite
def spoiled(draw: st.DrawFn, reply: Reply) -> tuple[str, bytes]:
    table, data = reply
    text = json.dumps(table)
    how = draw(st.sampled_from(["table", "deep", "cut", "flip", "header", "tensors"] if data else ["table", "deep"]))
    if how == "table":
        text = json.dumps(draw(changed(table)))
    elif how == "deep":
        opened, closed = draw(st.sampled_from([("[", "]"), ('{"a":', "}")]))
        depth = draw(st.sampled_from([100, 900, 100_000]))
        bomb = opened * depth + "1" + closed * depth
        key = draw(st.sampled_from([*table, "failure"]))
        text = json.dumps({**table, key: "HERE"}).replace('"HERE"', bomb)
    elif how == "cut":
        data = data[: draw(st.integers(0, len(data) - 1))]
    elif how == "flip":
        place = draw(st.integers(0, min(len(data), 4000) - 1))
        data = data[:place] + bytes([data[place] ^ draw(st.integers(1, 255))]) + data[place + 1 :]
    else:
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8 : 8 + length])
        if how == "header":
            header = draw(changed(json.loads(tree["__metadata__"]["header"])))
            tree["__metadata__"]["header"] = json.dumps(header)
        else:
            tree = draw(changed(tree))
        new = json.dumps(tree).encode()
        data = struct.pack("<Q", len(new)) + new + data[8 + length :]
    return text, data


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_reply_with_anything_in_it_stops_nobody_but_its_site(
    recorded: dict[tuple[str, str], Reply], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    bad = data.draw(spoiled(recorded[CLINIC, kind]))
    notes = tiny.Notes()
    with tempfile.TemporaryDirectory() as place:
        loop = Replay(recorded, kind, *bad)
        run = over_network(Path(place), "hbn", loop=loop, rounds=1, observer=notes)
        trained = {record["client"] for record in run.records("client")}
        assert {"ward", "hospital"} <= trained
        assert run.finished
    assert all(note.isprintable() for note in notes.notes)


# -- what once did, by name -------------------------------------------------------------------------------------
def evaluation(**changes: Any) -> dict[str, Any]:
    return {"split": "test", "statistics": "global", "correct": 3, "samples": 8, "loss_sum": 1.5, **changes}


@pytest.mark.parametrize("loss", [math.nan, math.inf, None, 1e300, 10**400, -1.0])
def test_the_loss_of_a_model_that_diverged_is_unknown_and_its_accuracy_counts(loss: Any) -> None:
    (found,) = evaluations_of("a", "a", [evaluation(loss_sum=loss)], {})
    assert math.isnan(found.loss)
    assert found.accuracy == 3 / 8


def test_the_same_images_count_once() -> None:
    with pytest.raises(BadMessage, match="twice"):
        evaluations_of("a", "a", [evaluation(), evaluation(correct=8)], {})
    with pytest.raises(BadMessage, match="too many"):
        evaluations_of("a", "a", [evaluation()] * 100_000, {})


GOOD = {
    "name": "a", "domain": "a", "classes": ["cat"], "shape": [3, 16, 16], "train": 1, "validation": 1, "test": 1,
    "version": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 65536, 65536]},
        {"shape": [2**62, 2**62, 2**62]},
        {"shape": [3, 16, math.nan]},
        {"classes": [str(n) for n in range(100_000)]},
        {"classes": ["x" * 10_000]},
        {"classes": ["a\x1b[2J"]},
        {"train": 10**400},
        {"name": "\u202eabc"},
        {"name": 7},
        {"test": -1},
        {"classes": []},
        {"classes": ["cat", "cat"]},
        {"shape": [3, 0, 16]},
    ],
)
def test_a_description_of_what_nobody_has_is_not_believed(change: dict[str, Any]) -> None:
    Description.read(GOOD)
    with pytest.raises(BadMessage) as refused:
        Description.read({**GOOD, **change})
    assert len(str(refused.value)) < 300


def test_the_shape_of_the_configuration_counts_before_that_of_the_sites() -> None:
    """Else the first of two sites could make the server build a network for images of its choice."""
    roster = agree("1", [described("a", shape=(3, 4096, 4096)), described("b")], shape=(3, 16, 16))
    assert [site.name for site in roster.sites] == ["b"]
    assert roster.sitting_out == {"a": "its images have the shape 3x4096x4096, and those of the federation 3x16x16"}
