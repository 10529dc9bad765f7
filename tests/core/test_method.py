from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.models import Output
from tests import tiny

CALLS: list[str] = []


class Tracing(Method):
    """Writes down every hook; keeps a counter in each memory and sends it around."""

    traits = Traits(needs_memory=True)

    def __init__(self, name: str) -> None:
        self.name = name

    def say(self, hook: str) -> None:
        CALLS.append(f"{self.name}.{hook}")

    def prepare(self, model: torch.nn.Module) -> None:
        self.say("prepare")

    def before_training(self, server: Server) -> None:
        self.say("before_training")
        server.extras["asked"] = torch.tensor(float(server.round))

    def start(self, client: LocalClient) -> None:
        self.say("start")
        assert client.extras["asked"].item() == client.round
        client.memory["rounds"] = client.memory.get("rounds", torch.zeros(())) + 1
        client.scratch["mine"] = self.name

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        self.say("inputs")
        assert client.scratch["mine"] == self.name
        return x

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> float:
        self.say("loss")
        return 0.0

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        self.say("gradients")

    def finish(self, client: LocalClient) -> Tensors:
        self.say("finish")
        return {"rounds": client.memory["rounds"]}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        self.say("weights")
        server.memory["seen"] = server.memory.get("seen", torch.zeros(())) + 1
        return mean

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        self.say("statistics")
        return mean

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        self.say("extras")
        assert all(list(update.extras) == ["rounds"] for update in updates)
        assert server.memory["seen"].item() == server.round + 1
        return {"total": torch.stack([update.extras["rounds"] for update in updates]).sum()}

    def before_evaluation(self, server: Server) -> None:
        self.say("before_evaluation")


HOOKS = [
    *("before_training", "start", "inputs", "loss", "gradients", "finish"),
    *("weights", "statistics", "extras", "before_evaluation"),
]


def test_hooks_run_in_the_order_written_with_memory_of_their_own(tmp_path: Path) -> None:
    CALLS.clear()
    on = tiny.federation({"ward": 4})
    run = tiny.run(tmp_path / "run", Composition([Tracing("b"), Tracing("a")]), on=on, rounds=2)
    one_round = [f"{part}.{hook}" for hook in HOOKS for part in ("b", "a")]
    assert ["b.prepare", "a.prepare", *one_round, *one_round] == CALLS
    assert run.finished


def test_parts_do_not_see_each_others_extras_and_memory() -> None:
    class Writes(Method):
        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value

        def start(self, client: LocalClient) -> None:
            assert not client.memory
            client.memory["x"] = torch.tensor(self.value)

        def finish(self, client: LocalClient) -> Tensors:
            return {"x": client.memory["x"] + 1}

    worker = tiny.setup(Composition([Writes("a", 1.0), Writes("ab", 2.0)])).worker
    update, memory = worker.train("ward", tiny.broadcast(worker), {})
    assert {name: t.item() for name, t in memory.items()} == {"a/x": 1.0, "ab/x": 2.0}
    assert {name: t.item() for name, t in update.extras.items()} == {"a/x": 2.0, "ab/x": 3.0}


class Named(Method):
    def __init__(self, name: str) -> None:
        self.name = name


class MakesWeights(Named):
    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return mean


class ReplacesWeights(MakesWeights):
    traits = Traits(replaces={"weights"})


class ReplacesShares(Named):
    traits = Traits(replaces={"shares"})

    def before_training(self, server: Server) -> None:
        server.shares = dict.fromkeys(server.participants, 1.0)


class DiscardsShares(ReplacesWeights):
    traits = Traits(replaces={"shares", "weights"})


class OwnForward(Named):
    def forward(self, client: LocalClient, x: Tensor) -> Output:
        return super().forward(client, x)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([Named("a"), Named("a")], "names 'a' twice"),
        ([MakesWeights("a"), ReplacesWeights("b")], "write 'b' before 'a'"),
        ([ReplacesWeights("a"), ReplacesWeights("b")], "keep one of them"),
        ([ReplacesWeights("a"), MakesWeights("c"), ReplacesWeights("b")], "'b' would discard what 'c' made"),
        ([OwnForward("a"), OwnForward("b")], "both make the forward pass"),
        ([ReplacesShares("a"), ReplacesShares("b")], "both make the clients' shares"),
        ([ReplacesShares("a"), DiscardsShares("b")], "'b' would discard what 'a' made"),
        ([Named("local")], "cannot be called 'local'"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(parts: list[Method], reason: str) -> None:
    with pytest.raises(MethodError, match=reason) as caught:
        Composition(parts)
    assert "\n" not in str(caught.value)


def test_a_part_may_change_what_another_replaced_before_it() -> None:
    Composition([ReplacesWeights("a"), MakesWeights("b")])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fedavg+fedavg", "names 'fedavg' twice"),
        ("central+fedbn", "'central' pools the data of all clients, so there is nothing that 'fedbn' could keep"),
        ("standalone+central", "'central' pools"),
        ("standalone+fedprox", "Nothing travels in 'standalone', so 'fedprox' has nothing to act on"),
        ("fedprox+standalone", "Nothing travels in 'standalone'"),
        ("gn+ln", r"'ln' acts on batch norm, and there is none to act on \('gn' took it out\)"),
        ("fedbn+gn", r"'fedbn' acts on batch norm, and there is none to act on \('gn' took it out\)"),
        ("gn+fedbn", "'fedbn' acts on batch norm"),
        ("ln+silobn", "'silobn' acts on batch norm"),
    ],
)
def test_impossible_compositions_are_refused_before_training(text: str, reason: str) -> None:
    with pytest.raises(MethodError, match=reason) as caught:
        tiny.setup(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["fedprox+fedbn", "fedprox+gn", "gn+standalone", "central+fedprox", "silobn+fedprox", "central+ln"]
)
def test_possible_compositions_run(tmp_path: Path, text: str) -> None:
    assert tiny.run(tmp_path / "run", text, rounds=1).finished


def test_options_go_in_brackets_or_by_keyword() -> None:
    assert methods.build("fedprox(mu=0.5)").mu == 0.5  # type: ignore[attr-defined]
    assert methods.build("fedprox", mu=0.5).mu == 0.5  # type: ignore[attr-defined]
    composed = methods.build("fedprox(mu=0.5)+gn", groups=4)
    assert isinstance(composed, Composition)
    assert (composed.parts[0].mu, composed.parts[1].groups) == (0.5, 4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("fedporx", {}, "no method named 'fedporx': did you mean 'fedprox'?"),
        ("fedprox(nu=1)", {}, "The method 'fedprox' has no option 'nu': did you mean 'mu'?"),
        ("fedprox", {"nu": 1}, "'fedprox' has no option 'nu': did you mean 'mu'?"),
        ("fedavg(mu=1)", {}, "it takes none"),
        ("fedbn+silobn", {"unseen": "batch"}, "belongs to 'fedbn' and 'silobn': write it in brackets"),
        ("fedprox(mu=-1)", {}, "The 'mu' of fedprox is -1: give at least 0."),
        ("fedprox(mu=high)", {}, "The 'mu' of fedprox is 'high', which is not a number: give at least 0."),
        ("fedprox(mu=true)", {}, "which is not a number"),
        ("gn(groups=2.5)", {}, "The 'groups' of gn is 2.5, which is not a whole number: give at least 1."),
        ("gn(groups=0)", {}, "give at least 1"),
        ("fedbn(unseen=bacth)", {}, "did you mean 'batch'?"),
    ],
)
def test_wrong_names_and_options_name_the_nearest(text: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        methods.build(text, **options)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_method_has_a_sentence_and_a_paper() -> None:
    for entry in methods.METHODS:
        assert entry.summary.endswith("."), entry.name
        assert entry.paper, entry.name
        assert methods.build(entry.name).name == entry.name


def page_of(method: str) -> str:
    """The options on its own page, or its section of its group's."""
    folder = Path(__file__).parents[2] / "docs" / "methods"
    if (folder / f"{method}.md").exists():
        return (folder / f"{method}.md").read_text().partition("## Parameters")[2].partition("\n## ")[0]
    sections = [part for page in folder.glob("*.md") for part in page.read_text().split("\n## ")[1:]]
    (found,) = [part for part in sections if part.splitlines()[0].lower() == method]
    return found


def test_the_page_of_every_method_has_its_options_with_their_defaults() -> None:
    for entry in methods.METHODS:
        cells = [line.split("|")[1:3] for line in page_of(entry.name).splitlines() if line.startswith("| `")]
        defaults = {name: default for names, default in cells for name in re.findall(r"`(\w+)`", names)}
        assert defaults.keys() == entry.options().keys(), entry.name
        for name, option in entry.options().items():
            if isinstance(option.default, str):
                assert defaults[name].strip() == f"`{option.default}`", (entry.name, name)


class Asks(Method):
    """A question inside the round, with tensors both ways and memory on the client."""

    name = "asks"
    traits = Traits(needs_memory=True)

    def before_training(self, server: Server) -> None:
        answers = server.ask(server.participants, "double", {"x": torch.tensor([float(server.round)])})
        assert list(answers) == server.participants
        server.memory["sum"] = sum((a.tensors["y"] for a in answers.values()), torch.zeros(1))

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        assert question == "double"
        client.memory["asked"] = client.memory.get("asked", torch.zeros(1)) + 1
        return {"y": 2 * tensors["x"] + client.memory["asked"]}

    def finish(self, client: LocalClient) -> Tensors:
        assert client.memory["asked"].item() == client.round + 1
        return {}

    def before_evaluation(self, server: Server) -> None:
        # (2 round + times asked) from each of three clients
        assert server.memory["sum"].item() == 3 * (2 * server.round + server.round + 1)


class AsksWithoutName(Asks):
    name = ""


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_question_reaches_every_client_and_counts_as_communication(tmp_path: Path, executor: str) -> None:
    options: dict[str, Any] = {"rounds": 2, **tiny.by(executor)}
    plain = tiny.run(tmp_path / "plain", **options)
    run = tiny.run(tmp_path / "run", AsksWithoutName(), **options)
    assert run.summary is not None
    assert plain.summary is not None
    assert run.summary["questions"] == 2
    assert run.summary["bytes_up"] == plain.summary["bytes_up"] + 2 * 3 * 4
    assert run.summary["bytes_down"] == 2 * plain.summary["bytes_down"] + 2 * 3 * 4


def test_an_unknown_question_is_an_error_under_every_executor(tmp_path: Path) -> None:
    class Lost(Method):
        name = "lost"

        def before_training(self, server: Server) -> None:
            server.ask(server.participants, "what")

    for executor in ("serial", "processes"):
        with pytest.raises(FedkeelError, match="'lost' was asked 'what', which it does not know"):
            tiny.run(tmp_path / executor, Lost(), executor=executor, workers=1)


def test_what_prepare_says_is_kept_never_travels() -> None:
    class Keeps(Method):
        def prepare(self, model: nn.Module) -> None:
            self.kept = ["head.bias"]

    method = Keeps()
    layout = tiny.setup(method).worker.layout
    assert layout.local == ["head.bias"]
    assert "head.weight" in layout.weights
    assert not Keeps().kept


def test_what_clients_start_from_may_be_something_else_and_the_server_s_own_stays(tmp_path: Path) -> None:
    seen: list[float] = []

    class Ahead(Method):
        name = "ahead"

        def before_training(self, server: Server) -> None:
            server.weights = {name: torch.zeros_like(weight) for name, weight in server.weights.items()}

        def start(self, client: LocalClient) -> None:
            seen.append(max(float(weight.abs().max()) for weight in client.broadcast.weights.values()))

        def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
            seen.append(max(float(weight.abs().max()) for weight in server.weights.values()))
            return mean

    tiny.run(tmp_path / "r", Ahead(), on=tiny.federation({"ward": 4}), rounds=1)
    sent, own = seen
    assert sent == 0
    assert own > 0


def test_what_prepare_returns_is_done_when_all_have_prepared() -> None:
    order: list[str] = []

    class First(Named):
        def prepare(self, model: nn.Module) -> Callable[[], None]:
            order.append(self.name)
            return lambda: order.append(f"{self.name} afterwards")

    class Replaces(Named):
        traits = Traits(replaces={"head"})

        def prepare(self, model: nn.Module) -> None:
            order.append(self.name)

    tiny.setup(Composition([First("a"), First("b"), Replaces("c")]))
    assert order == ["c", "a", "b", "a afterwards", "b afterwards"]


def test_a_question_carries_what_an_earlier_part_has_just_made(tmp_path: Path) -> None:
    carried: list[float] = []

    class Makes(Named):
        def before_training(self, server: Server) -> None:
            server.extras = {"made": torch.tensor(float(server.round + 1))}

    class Asks(Named):
        def before_training(self, server: Server) -> None:
            server.ask(server.participants, "what")

        def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
            carried.append(float(client.broadcast.extras["a/made"]))
            return {}

    tiny.run(tmp_path / "r", Composition([Makes("a"), Asks("b")]), on=tiny.federation({"ward": 4}), rounds=2)
    assert carried == [1.0, 2.0]
