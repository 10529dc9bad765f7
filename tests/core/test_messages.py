from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeel.core.checking import check
from fedkeel.core.messages import (
    BadMessage,
    Broadcast,
    Update,
    broadcast_from_bytes,
    broadcast_to_bytes,
    pack,
    unpack,
    update_from_bytes,
    update_to_bytes,
)

BROADCAST = Broadcast(
    round=3,
    rounds=10,
    weights={"z.weight": torch.arange(6.0).reshape(2, 3), "a.weight": torch.ones(2, dtype=torch.float16)},
    statistics={
        "bn.running_var": torch.ones(2),
        "bn.running_mean": torch.zeros(2),
        "bn.num_batches_tracked": torch.tensor(4),
    },
    extras={"part/prototypes": torch.zeros(0, 5)},
)
UPDATE = Update(
    client="St. Mary's / ward 3",
    samples=17,
    round=3,
    weights=BROADCAST.weights,
    statistics=BROADCAST.statistics,
    extras={"part/c": torch.tensor([1.5])},
    metrics={"loss": 0.25},
)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def test_messages_survive_the_wire_in_order() -> None:
    b = broadcast_from_bytes(broadcast_to_bytes(BROADCAST))
    assert (b.round, b.rounds) == (3, 10)
    u = update_from_bytes(update_to_bytes(UPDATE))
    assert (u.client, u.samples, u.round, u.metrics) == (UPDATE.client, 17, 3, {"loss": 0.25})
    for sent, got in ((BROADCAST, b), (UPDATE, u)):
        for group in ("weights", "statistics", "extras"):
            assert same(getattr(sent, group), getattr(got, group))
        assert got.nbytes == sent.nbytes


def test_tied_and_strided_tensors_travel_as_what_they_look_like() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": base, "b": base, "t": base.T, "row": base[1], "column": base[:, 2]}
    assert same(unpack(pack({}, weights=tensors))[1]["weights"], tensors)


def test_a_good_update_passes() -> None:
    check(UPDATE, BROADCAST)


def changed(group: str, name: str, tensor: Tensor) -> Update:
    return replace(UPDATE, **{group: {**getattr(UPDATE, group), name: tensor}})


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (changed("weights", "z.weight", torch.full((2, 3), math.nan)), "'z.weight' holds a value that is not finite"),
        (changed("weights", "a.weight", torch.tensor([1.0, math.inf]).half()), "not finite"),
        (changed("weights", "z.weight", torch.tensor([[1e38, -math.inf, 0]] * 2)), "not finite"),
        (changed("statistics", "bn.running_mean", torch.tensor([0.0, -math.inf])), "not finite"),
        (changed("extras", "part/c", torch.tensor([math.nan])), "not finite"),
        (changed("weights", "z.weight", torch.zeros(3, 2)), r"shape \(3, 2\), not \(2, 3\)"),
        (changed("weights", "z.weight", torch.zeros(2, 3).double()), "dtype torch.float64, not torch.float32"),
        (changed("statistics", "bn.num_batches_tracked", torch.tensor(4.0)), "dtype torch.float32, not torch.int64"),
        (changed("weights", "extra", torch.zeros(1)), r"not expected \['extra'\]"),
        (replace(UPDATE, weights={"z.weight": torch.zeros(2, 3)}), r"missing \['a.weight'\]"),
        (replace(UPDATE, statistics={}), "statistics do not match"),
        (changed("statistics", "bn.running_var", torch.tensor([1.0, -1e-9])), "variance 'bn.running_var' is negative"),
        (changed("statistics", "bn.num_batches_tracked", torch.tensor(-1)), "counter 'bn.num_batches_tracked' is -1"),
        (changed("statistics", "bn.num_batches_tracked", torch.tensor(2**41)), "counter 'bn.num_batches_tracked' is"),
        (replace(UPDATE, samples=0), "number of samples is 0"),
        (replace(UPDATE, samples=-5), "number of samples is -5"),
        (replace(UPDATE, samples=2**60), "number of samples is"),
        (replace(UPDATE, samples=True), "not an integer but True"),
        (replace(UPDATE, samples=2.5), "not an integer but 2.5"),  # type: ignore[arg-type]
        (replace(UPDATE, round=2), "of round 3, not of round 4"),
        (replace(UPDATE, metrics={"loss": math.nan}), "its metric 'loss' is nan"),
    ],
)
def test_a_bad_update_is_refused(update: Update, reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        check(update, BROADCAST)


def test_numbers_that_would_not_survive_a_mean_are_refused() -> None:
    huge = torch.finfo(torch.float32).max
    with pytest.raises(BadMessage, match="beyond use"):
        check(changed("weights", "z.weight", torch.full((2, 3), huge)), BROADCAST)
    check(changed("weights", "z.weight", torch.full((2, 3), 1e14)), BROADCAST)


WIRE = update_to_bytes(UPDATE)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(WIRE) - 1))
def test_a_truncated_message_is_a_bad_message(length: int) -> None:
    with pytest.raises(BadMessage):
        update_from_bytes(WIRE[:length])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        update_from_bytes(data)
    with pytest.raises(BadMessage):
        broadcast_from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WIRE) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_read_or_refused_but_nothing_else(position: int, flip: int) -> None:
    damaged = bytearray(WIRE)
    damaged[position] ^= flip
    with contextlib.suppress(BadMessage):
        check(update_from_bytes(bytes(damaged)), BROADCAST)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
headers = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("client", "samples", "round", "rounds", "metrics"), json_values)
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(headers)
def test_any_header_is_read_or_refused(header: dict[str, Any]) -> None:
    data = pack(header, weights={"w": torch.zeros(1)})
    for read in (update_from_bytes, broadcast_from_bytes):
        with contextlib.suppress(BadMessage):
            read(data)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"header": "{}"},
        {"header": "{}", "order": "[]"},
        {"header": "{}", "order": '["weights//w", "weights//w"]'},
        {"header": "{}", "order": "7"},
        {"header": "[]", "order": '["weights//w"]'},
        {"header": "[" * 100_000, "order": '["weights//w"]'},
        {"header": json.dumps({"round": math.inf, "rounds": 1}), "order": '["weights//w"]'},
    ],
)
def test_a_header_that_lies_is_refused(metadata: dict[str, str]) -> None:
    data = safetensors.torch.save({"weights//w": torch.zeros(1)}, metadata=metadata)
    with pytest.raises(BadMessage):
        broadcast_from_bytes(data)


def test_a_tensor_without_a_group_is_refused() -> None:
    data = safetensors.torch.save({"w": torch.zeros(1)}, metadata={"header": "{}", "order": '["w"]'})
    with pytest.raises(BadMessage, match="belongs to no group"):
        unpack(data)


def test_what_a_refusal_quotes_does_no_harm_in_a_log() -> None:
    forged = str(BadMessage("it has the tensor '\x1b[2J\nRound 3: all is well'" + "x" * 5000))
    assert forged.isprintable()
    assert len(forged) <= 1000
    assert "Round 3: all is well" in forged
    assert str(BadMessage("its name is 'Süd'")) == "its name is 'Süd'"
