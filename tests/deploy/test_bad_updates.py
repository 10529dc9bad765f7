"""A thousand bad updates, no two alike: the model is as if none of them had come."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.messages import Update, broadcast_from_bytes, pack, update_to_bytes
from fedkeel.engine.executors.sites.channel import Reply, Table
from fedkeel.runs.run import Run
from tests import tiny
from tests.deploy.loop import Loop, over_network, sites_of

LIARS, ROUNDS = 50, 20
HONEST = "honest"


def spoiled(update: Update, kind: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Update:
    tensors = {name: tensor.clone() for name, tensor in getattr(update, kind).items()}
    change(tensors)
    return replace(update, **{kind: tensors})


def not_finite(update: Update, draw: random.Random) -> Reply:
    kind = draw.choice(["weights", "statistics"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[draw.choice([name for name in sorted(tensors) if tensors[name].is_floating_point()])].view(-1)
        tensor[draw.randrange(len(tensor))] = draw.choice([math.nan, math.inf, -math.inf, 3e38, -3e38])

    return {}, update_to_bytes(spoiled(update, kind, change))


def another_shape(update: Update, draw: random.Random) -> Reply:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice(sorted(tensors))
        shape = [*tensors[name].shape]
        place = draw.randrange(len(shape) + 1)
        shape = [*shape[:place], draw.randrange(2, 9), *shape[place:]]
        tensors[name] = torch.zeros(draw.choice([shape, [*shape[1:], 17], [0]]))

    return {}, update_to_bytes(spoiled(update, draw.choice(["weights", "statistics"]), change))


def another_type(update: Update, draw: random.Random) -> Reply:
    types = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice(sorted(tensors))
        tensors[name] = tensors[name].to(draw.choice(types))

    return {}, update_to_bytes(spoiled(update, "weights", change))


def other_names(update: Update, draw: random.Random) -> Reply:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice(sorted(tensors))
        new = "".join(draw.choices("abc./_\u00e9 \n", k=draw.randrange(1, 30)))
        if draw.random() < 0.5:
            tensors[new] = torch.zeros(draw.randrange(1, 50))
        else:
            tensors[new] = tensors.pop(name)

    return {}, update_to_bytes(spoiled(update, draw.choice(["weights", "statistics"]), change))


def wrong_count(update: Update, draw: random.Random) -> Reply:
    samples: Any = draw.choice(
        [0, -draw.randrange(1, 10**9), 2 ** draw.randrange(40, 62), draw.random(), True, None, "many", [3], {"n": 3}]
    )
    header = {"client": update.client, "samples": samples, "round": update.round, "metrics": {}}
    return {}, pack(header, weights=update.weights, statistics=update.statistics)


def another_round(update: Update, draw: random.Random) -> Reply:
    away = draw.randrange(1, 1000) * draw.choice([-1, 1])
    return {}, update_to_bytes(replace(update, round=update.round + away))


def anothers_name(update: Update, draw: random.Random) -> Reply:
    name = draw.choice(["honest", "", "\x00", "liar", update.client + " ", "x" * draw.randrange(100, 10_000)])
    return {}, update_to_bytes(replace(update, client=name))


def negative_variance(update: Update, draw: random.Random) -> Reply:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = draw.choice([name for name in sorted(tensors) if name.endswith("running_var")])
        tensors[name][draw.randrange(len(tensors[name]))] = -draw.random() - 1e-3

    return {}, update_to_bytes(spoiled(update, "statistics", change))


def cut_short(update: Update, draw: random.Random) -> Reply:
    wire = update_to_bytes(update)
    return {}, wire[: draw.randrange(len(wire))]


def random_bytes(_: Update, draw: random.Random) -> Reply:
    return {}, draw.randbytes(draw.randrange(3000))


def far_too_much(update: Update, draw: random.Random) -> Reply:
    wire = update_to_bytes(update)
    return {}, wire + bytes(8 * len(wire) + draw.randrange(4, 6) * 2**20)


def damaged_header(update: Update, draw: random.Random) -> Reply:
    wire = bytearray(update_to_bytes(update))
    wire[draw.randrange(2, 8)] ^= draw.randrange(1, 256)  # of the header's length
    return {}, bytes(wire)


def nan_metric(update: Update, draw: random.Random) -> Reply:
    return {}, update_to_bytes(replace(update, metrics={"loss": draw.choice([math.nan, math.inf, -math.inf])}))


def a_failure(_: Update, draw: random.Random) -> Reply:
    return {"failure": draw.choice(["no memory", "", 7, None, ["x"], {"a": 1}, "\x1b[2J" * 100])}, b""


KINDS = [
    *(not_finite, another_shape, another_type, other_names, wrong_count, another_round, anothers_name),
    *(negative_variance, cut_short, random_bytes, damaged_header, nan_metric, a_failure),
]


class Liars(Loop):
    """All nodes but the honest one reply to `train` with something bad, or, if they are `silent`, not at all."""

    def __init__(self, *arguments: Any, silent: bool) -> None:
        super().__init__(*arguments)
        self.silent, self.sent = silent, 0
        self.draw = random.Random(11)

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        if next(iter(requests.values()))["do"] != "train":
            yield from super().exchange(requests, message, timeout)
            return
        sent = broadcast_from_bytes(message)
        for node, request in requests.items():
            if node == HONEST:
                table, data = self.at[node].reply(json.loads(json.dumps(request)), message)
                yield node, (json.loads(json.dumps(table)), data)
            elif not self.silent:
                name = next(client.name for client in self.at[node].read(None, None))  # type: ignore[arg-type]
                good = Update(name, 20, round=sent.round, weights=sent.weights, statistics=sent.statistics)
                kind = far_too_much if self.sent % 200 == 0 else self.draw.choice(KINDS)
                self.sent += 1
                yield node, kind(good, self.draw)


def run_among(directory: Path, silent: bool) -> tuple[Run, Liars, tiny.Notes]:
    federation = tiny.federation()
    first = federation.clients[0]
    clients = tuple(
        replace(first, name="honest" if i == 0 else f"liar{i:03}", domain=f"d{i:03}") for i in range(LIARS + 1)
    )
    among = replace(federation, clients=clients, unseen=())
    loop = Liars(sites_of(among, directory / "sites", tiny.model()), silent=silent)
    notes = tiny.Notes()
    options = {"rounds": ROUNDS, "evaluate_every": ROUNDS, "checkpoint_every": ROUNDS, "learning_rate": 0.01}
    return over_network(directory, loop=loop, on=among, observer=notes, **options), loop, notes


@pytest.mark.slow
def test_a_thousand_bad_updates_leave_the_model_as_if_none_had_come(tmp_path: Path) -> None:
    among_liars, loop, notes = run_among(tmp_path / "liars", silent=False)
    assert loop.sent == LIARS * ROUNDS == 1000
    dropped = among_liars.records("dropped")
    assert len(dropped) == 1000
    assert all(record["reason"] and record["client"].startswith("liar") for record in dropped)
    assert sum("the update of 'liar" in note for note in notes.notes) == 1000
    assert all(note.isprintable() for note in notes.notes)
    alone, _, _ = run_among(tmp_path / "alone", silent=True)
    one, other = (run.directory / "model.safetensors" for run in (among_liars, alone))
    assert one.read_bytes() == other.read_bytes()
