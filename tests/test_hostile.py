"""What a site that lies, or is broken, can send: the others go on as if it had sent nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeel import methods
from fedkeel.core import state
from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update, update_from_bytes, update_to_bytes
from fedkeel.core.method import Method
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.engine.rounds import Federated
from fedkeel.engine.tasks import Result, Task
from fedkeel.methods import METHODS
from fedkeel.runs.store import Store
from tests import tiny

LIAR = "clinic"
Change = Callable[[Update], Update | Missing]


class Scene:
    """A run after its first round, with the honest updates of the second: the liar's can be exchanged at will."""

    def __init__(self, method: str, directory: Path) -> None:
        setup = tiny.setup(method, rounds=4)
        self.store = Store.create(directory / "run", setup.config)
        self.notes = tiny.Notes()
        self.run = Federated(setup, setup.executor(), self.store, self.notes)
        self.run.round(0)
        server = self.run.server
        server.round = 1
        sent = replace(server, weights=dict(server.weights), shares={})
        self.run.method.before_training(sent)
        server.extras, server.memory, server.shares = sent.extras, sent.memory, sent.shares
        self.broadcast = sent.broadcast(sent.weights)
        self.start = replace(server, memory=dict(server.memory), extras=dict(server.extras))
        self.remembered = dict(self.run.memory.items())
        tasks = [Task("train", client, self.run.memory.look(client)) for client in server.participants]
        trained = [one for one in self.run.executor.map(tasks, self.broadcast) if isinstance(one, Result)]
        self.honest: dict[str, Update] = {one.client: one.outcome for one in trained}
        self.learnt = {one.client: one.memory for one in trained}

    def collect(self, message: Update | Missing) -> list[Result[Update]]:
        """What counts when the liar sends this."""
        self.run.server = replace(self.start, memory=dict(self.start.memory), extras=dict(self.start.extras))
        for client in tiny.SIZES:
            self.run.memory.keep(client, self.remembered.get(client, {}))

        def trained(tasks: Sequence[Task], _: Broadcast) -> Iterator[Result[Any] | Missing]:
            for task in tasks:
                sent = message if task.client == LIAR else self.honest[task.client]
                yield sent if isinstance(sent, Missing) else Result(task.client, sent, self.learnt[task.client])

        self.run.executor.map = trained  # type: ignore[method-assign]
        self.notes.notes.clear()
        return self.run._train(self.broadcast)[0]

    def outcome(self, message: Update | Missing) -> dict[str, Tensors]:
        """All that the round leaves behind."""
        self.run._aggregate(self.broadcast, self.collect(message))
        server = self.run.server
        clients = {f"client {name}": memory for name, memory in self.run.memory.items()}
        return {
            "weights": server.weights,
            "statistics": server.statistics,
            "extras": server.extras,
            "memory": server.memory,
            **clients,
        }


def same(left: dict[str, Tensors], right: dict[str, Tensors]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(
        left[group].keys() == right[group].keys()
        and all(torch.equal(left[group][name], tensor) for name, tensor in right[group].items())
        for group in left
    )


def changed(group: str, name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def act(update: Update) -> Update:
        tensors = getattr(update, group)
        return replace(update, **{group: {**tensors, name: change(tensors[name])}})

    return act


def with_number(number: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensor.view(-1)[0] = number
        return tensor

    return change


def without(group: str, name: str) -> Change:
    return lambda u: replace(u, **{group: {n: t for n, t in getattr(u, group).items() if n != name}})


LIES: dict[str, tuple[Change, str]] = {
    "nan": (changed("weights", "head.weight", with_number(math.nan)), "'head.weight' holds a value that is not finite"),
    "infinity": (
        changed("weights", "head.bias", with_number(-math.inf)),
        "'head.bias' holds a value that is not finite",
    ),
    "overflow": (changed("weights", "head.bias", with_number(3e38)), "'head.bias' holds 3e+38, which is beyond use"),
    "shape": (changed("weights", "head.weight", lambda t: t.T), "the weight 'head.weight' has shape (16, 4)"),
    "dtype": (changed("weights", "head.weight", lambda t: t.double()), "dtype torch.float64"),
    "half": (changed("weights", "head.weight", lambda t: t.half()), "dtype torch.float16"),
    "large": (changed("weights", "head.weight", lambda t: t.repeat(100, 1)), "shape (400, 16), not (4, 16)"),
    "missing": (without("weights", "head.weight"), "missing ['head.weight']"),
    "renamed": (lambda u: replace(u, weights={f"x.{n}": t for n, t in u.weights.items()}), "not expected ['x."),
    "empty": (lambda u: replace(u, weights={}, statistics={}), "its weights do not match"),
    "no samples": (lambda u: replace(u, samples=0), "its number of samples is 0"),
    "negative samples": (lambda u: replace(u, samples=-7), "its number of samples is -7"),
    "huge samples": (lambda u: replace(u, samples=10**30), "its number of samples is 1000000"),
    "replayed": (lambda u: replace(u, round=0), "it is of round 1, not of round 2"),
    "another's name": (lambda u: replace(u, client="ward"), "it says that it is of 'ward'"),
    "metric": (lambda u: replace(u, metrics={"loss": math.inf}), "its metric 'loss' is inf"),
    "metrics": (lambda u: replace(u, metrics={str(i): 0.0 for i in range(101)}), "it has 101 metrics"),
    "surplus extra": (lambda u: replace(u, extras={**u.extras, "x/y": torch.zeros(1)}), "not expected ['x/y']"),
    "bare extra": (lambda u: replace(u, extras={**u.extras, "bare": torch.zeros(1)}), "not expected ['bare']"),
    "silence": (lambda u: Missing(u.client, "it cannot be read"), "it cannot be read"),
}
STATISTICS_LIES: dict[str, tuple[str, Change, str]] = {
    "variance": (
        "running_var",
        changed("statistics", "encoder.1.running_var", with_number(-1e-6)),
        "running_var' is negative",
    ),
    "counter": (
        "num_batches_tracked",
        changed("statistics", "encoder.1.num_batches_tracked", lambda t: -t),
        "num_batches_tracked' is -",
    ),
    "great counter": (
        "num_batches_tracked",
        changed("statistics", "encoder.1.num_batches_tracked", lambda t: t + 2**62),
        "num_batches_tracked' is 46",
    ),
}
SEVERAL = ("fedavg", "hbn", "fedcoda", "scaffold", "fedbn", "fedplvm", "fedfa", "fedavgm+fpl", "fedheal", "ga")


@pytest.fixture(scope="module", params=SEVERAL)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(request.param, tmp_path_factory.mktemp("hostile"))


@pytest.mark.slow
def test_a_lie_is_dropped_and_the_round_is_as_if_it_had_not_come(scene: Scene) -> None:
    without_it = scene.outcome(Missing(LIAR, "gone"))
    assert not same(scene.outcome(scene.honest[LIAR]), without_it)
    sent = scene.honest[LIAR].statistics
    lies = LIES | {name: lie for name, (entry, *lie) in STATISTICS_LIES.items() if f"encoder.1.{entry}" in sent}
    for name, (lie, reason) in lies.items():
        assert same(scene.outcome(lie(scene.honest[LIAR])), without_it), name
        assert len(scene.notes.notes) == 1, name
        assert scene.notes.notes[0].startswith(f"Round 2: the update of '{LIAR}' is dropped, "), name
        assert reason in scene.notes.notes[0], name


def test_an_extra_that_is_missing_misshapen_or_of_another_kind_is_dropped(scene: Scene) -> None:
    update = scene.honest[LIAR]
    without_it = scene.outcome(Missing(LIAR, "gone"))
    for name in update.extras:
        for lie in (
            without("extras", name),
            changed("extras", name, lambda t: t[..., None]),
            changed("extras", name, lambda t: t.reshape(-1)[:-1]),
            changed("extras", name, lambda t: t.to(torch.complex64)),
            changed("extras", name, lambda t: torch.full(t.shape, math.nan)),
        ):
            assert same(scene.outcome(lie(update)), without_it), name
            assert len(scene.notes.notes) == 1, name


def test_the_scenes_have_what_they_are_there_for(tmp_path: Path) -> None:
    sent = {method: set(Scene(method, tmp_path / method).honest[LIAR].extras) for method in ("fedavg", "fedcoda")}
    assert sent == {"fedavg": set(), "fedcoda": {f"fedcoda/{name}" for name in ("history", "prototypes", "present")}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "extra", "value", "reason"),
    [
        ("fedplvm", "classes", 4, "holds 4, above 3"),
        ("fedplvm", "classes", -1, "holds -1, below 0"),
        ("fedfa", "std", -0.5, "holds -0.5, below 0"),
        ("fedcoda", "history", -1.0, "holds -1, below 0"),
    ],
)
def test_an_extra_out_of_its_range_is_dropped(
    tmp_path: Path, method: str, extra: str, value: float, reason: str
) -> None:
    scene = Scene(method, tmp_path)
    name = f"{method.partition('(')[0]}/{extra}"
    scene.collect(changed("extras", name, with_number(value))(scene.honest[LIAR]))
    assert reason in scene.notes.notes[0]


def test_rows_and_their_classes_go_together_and_are_not_beyond_reason(tmp_path: Path) -> None:
    scene = Scene("fedplvm", tmp_path)
    update = scene.honest[LIAR]
    scene.collect(changed("extras", "fedplvm/classes", lambda t: torch.cat([t, t]))(update))
    assert "'fedplvm/classes' has shape" in scene.notes.notes[0].replace("'classes", "'fedplvm/classes")
    flood = {"fedplvm/prototypes": torch.zeros(20_000, 16), "fedplvm/classes": torch.zeros(20_000, dtype=torch.int64)}
    scene.collect(replace(update, extras=flood))
    assert "20000 rows" in scene.notes.notes[0]


def test_every_method_says_what_it_expects() -> None:
    """So none of them leaves the server's rules to whatever a client sends."""
    for entry in METHODS:
        method = methods.build(entry.name)
        silent = method.overrides("finish") or method.overrides("answer")
        assert not silent or method.overrides("expects"), entry.name


# -- generated --
def read(data: bytes) -> Update | Missing:
    try:
        return update_from_bytes(data)
    except BadMessage as bad:
        return Missing(LIAR, str(bad))


def assert_harmless(scene: Scene, message: Update | Missing) -> None:
    """It is dropped with a word, and the others' updates are what they were; or, sound by all that can be told, it
    counts, and what comes of it is finite."""
    counted = scene.collect(message)
    others = [one for one in counted if one.client != LIAR]
    assert [one.client for one in others] == [name for name in tiny.SIZES if name != LIAR]
    assert all(one.outcome is scene.honest[one.client] for one in others)
    if len(counted) == len(others):
        assert f"the update of '{LIAR}' is dropped" in scene.notes.notes[0]
        assert scene.run.memory.look(LIAR) is scene.remembered.get(LIAR) or not scene.run.memory.look(LIAR)
        return
    assert not scene.notes.notes
    scene.run._aggregate(scene.broadcast, counted)
    server = scene.run.server
    for given_tensors, old in ((server.weights, scene.start.weights), (server.statistics, scene.start.statistics)):
        assert {name: t.shape for name, t in given_tensors.items()} == {name: t.shape for name, t in old.items()}
    for tensor in [*server.weights.values(), *server.statistics.values(), *server.extras.values()]:
        assert not state.is_continuous(tensor) or bool(torch.isfinite(tensor).all())


NUMBERS = st.one_of(
    st.floats(width=32), st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -1e30, 1e15, -1.0, 0.0, 1e-45])
)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])


@st.composite
def tensors(draw: st.DrawFn, honest: Tensor) -> Tensor:
    """Something in place of an honest tensor."""
    kind = draw(st.sampled_from(["number", "fill", "scale", "dtype", "shape", "cut", "flood", "scalar", "empty"]))
    if kind == "number" and honest.numel() and honest.dtype.is_floating_point:
        place = draw(st.integers(0, honest.numel() - 1))
        lie = honest.clone(memory_format=torch.contiguous_format)
        lie.view(-1)[place] = torch.tensor(draw(NUMBERS)).to(lie.dtype)
        return lie
    if kind == "fill" and honest.dtype.is_floating_point:
        return torch.full(honest.shape, draw(NUMBERS)).to(honest.dtype)
    if kind == "fill" and honest.dtype == torch.int64:
        return torch.full_like(honest, draw(st.integers(-(2**63), 2**63 - 1)))
    if kind == "scale" and honest.dtype.is_floating_point:
        return honest * draw(NUMBERS)
    if kind == "dtype":
        return honest.to(draw(DTYPES))
    if kind == "shape":
        return honest.reshape(-1) if honest.ndim != 1 else honest[None]
    if kind == "cut":
        return honest.reshape(-1)[: honest.numel() // 2]
    if kind == "flood":
        return honest.expand(100, *honest.shape)
    return torch.zeros(()) if kind == "scalar" else honest.new_empty(0)


@st.composite
def lies(draw: st.DrawFn, honest: Update) -> Update:
    """An update with one to three things in it changed."""
    update = honest
    for _ in range(draw(st.integers(1, 3))):
        group = draw(st.sampled_from(["weights", "statistics", "extras", "header"]))
        if group == "header":
            field = draw(st.sampled_from(["samples", "round", "client", "metrics"]))
            values: dict[str, st.SearchStrategy[Any]] = {
                "samples": st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.just(2**41)),
                "round": st.integers(),
                "client": st.text(max_size=5),
                "metrics": st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
            }
            update = replace(update, **{field: draw(values[field])})
            continue
        entries = dict(getattr(update, group))
        action = draw(st.sampled_from(["change", "remove", "add", "rename"]))
        if action == "add" or not entries:
            entries[draw(st.text(max_size=8))] = torch.full((draw(st.integers(0, 3)),), draw(NUMBERS))
        else:
            name = draw(st.sampled_from(sorted(entries)))
            old = entries.pop(name)
            if action == "change":
                entries[name] = draw(tensors(old))
            elif action == "rename":
                entries[draw(st.text(max_size=8))] = old
        update = replace(update, **{group: entries})
    return update


@st.composite
def damaged(draw: st.DrawFn, honest: bytes) -> bytes:
    """The bytes of an honest update with some flipped, cut off, put in, or altogether others."""
    kind = draw(st.sampled_from(["flip", "flip", "header", "cut", "insert", "random"]))
    if kind == "random":
        return draw(st.binary(max_size=300))
    if kind == "cut":
        return honest[: draw(st.integers(0, len(honest) - 1))]
    data = bytearray(honest)
    if kind == "insert":
        place = draw(st.integers(0, len(data)))
        return bytes(data[:place]) + draw(st.binary(min_size=1, max_size=20)) + bytes(data[place:])
    end = 8 + int.from_bytes(honest[:8], "little") if kind == "header" else len(data)
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, end - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def bombard(scene: Scene, examples: int) -> None:
    honest = scene.honest[LIAR]
    wire = update_to_bytes(honest)
    common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=examples, **common)  # type: ignore[arg-type]
    @given(lies(honest))
    def at_the_level_of_tensors(update: Update) -> None:
        assert_harmless(scene, update)

    @settings(max_examples=examples, **common)  # type: ignore[arg-type]
    @given(damaged(wire))
    def at_the_level_of_bytes(data: bytes) -> None:
        assert_harmless(scene, read(data))

    at_the_level_of_tensors()
    at_the_level_of_bytes()


@pytest.mark.slow
def test_two_thousand_generated_lies_harm_nobody(scene: Scene) -> None:
    bombard(scene, math.ceil(2_000 / len(SEVERAL) / 2))


# -- what a client remembers of an update that did not count --
class Vetoes(Method):
    """The server is told that one client's updates are of no use in one round."""

    name = "vetoes"

    def finish(self, client: LocalClient) -> Tensors:
        return {"x": torch.full((1,), math.nan if client.name == LIAR and client.round == 1 else 1.0)}


def test_the_client_of_a_dropped_update_remembers_what_it_did_before(tmp_path: Path) -> None:
    """SCAFFOLD's control variates stay in step: the server's is the mean of the clients'."""
    scene = Scene("scaffold", tmp_path)
    lie = replace(scene.honest[LIAR], samples=-1)
    scene.outcome(lie)
    total = sum(tiny.SIZES.values())
    memories = dict(scene.run.memory.items())
    for name, mean in scene.run.server.extras.items():
        expected = sum(tiny.SIZES[client] * memory[name].double() for client, memory in memories.items()) / total
        torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
    assert scene.run.memory.look(LIAR) is scene.remembered[LIAR]


def test_a_round_that_does_not_count_leaves_no_trace_on_any_client(tmp_path: Path) -> None:
    method = [methods.build("scaffold"), Vetoes()]
    from fedkeel.core.composition import Composition

    setup = tiny.setup(Composition(method), min_clients=3, rounds=3)
    store = Store.create(tmp_path / "r", setup.config)
    run = Federated(setup, setup.executor(), store, tiny.Notes())
    run.round(0)
    before = dict(run.memory.items())
    run.round(1)
    after = dict(run.memory.items())
    assert set(before) == set(after)
    assert all(torch.equal(after[client][name], t) for client in before for name, t in before[client].items())
    run.round(2)
    later = dict(run.memory.items())
    assert not torch.equal(later["ward"]["scaffold/head.bias"], before["ward"]["scaffold/head.bias"])


# -- answers to questions --
ANSWER_LIES: dict[str, Callable[[Answer], Answer]] = {
    "nothing": lambda a: replace(a, tensors={}),
    "surplus": lambda a: replace(a, tensors={**a.tensors, "x": torch.zeros(1)}),
    "shape": lambda a: replace(a, tensors={n: t.reshape(-1)[:-1] for n, t in a.tensors.items()}),
    "dtype": lambda a: replace(a, tensors={n: t.half() for n, t in a.tensors.items()}),
    "nan": lambda a: replace(a, tensors={n: t * math.nan for n, t in a.tensors.items()}),
    "samples": lambda a: replace(a, samples=-3),
    "name": lambda a: replace(a, client="ward"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hbn", "fedtan", "fedrdn", "fedfm(from_round=0)", "fediir", "ga"])
@pytest.mark.parametrize("lie", list(ANSWER_LIES))
def test_a_false_answer_is_as_none(tmp_path: Path, method: str, lie: str) -> None:
    def run(name: str, spoil: Callable[[Answer], Answer | Missing]) -> tuple[dict[str, bytes], list[str]]:
        setup = tiny.setup(method, rounds=2)
        store = Store.create(tmp_path / name, setup.config)
        executor, notes = setup.executor(), tiny.Notes()
        plain = executor.map

        def spoilt(tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
            for result in plain(tasks, broadcast):
                if isinstance(result, Missing) or not isinstance(result.outcome, Answer) or result.client != LIAR:
                    yield result
                    continue
                answer = spoil(result.outcome)
                yield answer if isinstance(answer, Missing) else replace(result, outcome=answer)

        executor.map = spoilt  # type: ignore[method-assign]
        federated = Federated(setup, executor, store, notes)
        server = federated.run()
        result = {n: t.numpy().tobytes() for n, t in {**server.weights, **server.statistics}.items()}
        return result, notes.notes

    silent, _ = run("silent", lambda a: Missing(a.client, "gone"))
    false, notes = run("false", ANSWER_LIES[lie])
    assert false == silent
    assert notes or (method, lie) == ("fedtan", "shape")  # told by the method itself, to the log
    assert all(f"'{LIAR}' did not answer" in note for note in notes)


def test_a_false_variance_in_an_answer_is_as_none(tmp_path: Path) -> None:
    scene = Scene("hbn", tmp_path)
    server: Server = scene.run.server
    layer = "encoder.1.running_var"
    tensors = {name: t.clone() for name, t in server.statistics.items() if "running" in name}
    scene.run.method.check_answer(server, "hbn/statistics", tensors)
    with pytest.raises(BadMessage, match="below 0"):
        scene.run.method.check_answer(server, "hbn/statistics", {**tensors, layer: -tensors[layer] - 1})
