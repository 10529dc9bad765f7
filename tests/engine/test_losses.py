"""Losses against their formulas, on every way that a step takes; and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedkeel
from fedkeel.core.client import LocalClient
from fedkeel.engine.losses import LOSSES, Loss, TrainingLoss, requested
from fedkeel.engine.schedules import SCHEDULES
from fedkeel.engine.setup import prepare
from fedkeel.errors import FedkeelError
from fedkeel.trust.privacy import sample_gradients
from tests import tiny

CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 3.0], [1.0, 4.0, -2.0], [0.3, 0.2, 0.1]])
LABELS = torch.tensor([0, 1, 1, 2])


def loss(text: str, labels: Tensor = LABELS) -> TrainingLoss:
    made = TrainingLoss(text, 3, CPU)
    made.begin(lambda: labels)
    return made


def log_probabilities() -> Tensor:
    return LOGITS - LOGITS.exp().sum(1, keepdim=True).log()


def of_labels(values: Tensor) -> Tensor:
    return values[torch.arange(4), LABELS]


def test_the_default_is_the_cross_entropy_to_the_last_bit() -> None:
    usual = torch.nn.functional.cross_entropy(LOGITS, LABELS)
    assert torch.equal(loss("cross-entropy")(LOGITS, LABELS), usual)
    torch.testing.assert_close(usual, -of_labels(log_probabilities()).mean())


def test_smoothing_gives_a_share_of_the_label_to_all_classes() -> None:
    logs = log_probabilities()
    wanted = -(0.9 * of_labels(logs) + 0.1 * logs.mean(1)).mean()
    torch.testing.assert_close(loss("cross-entropy(label_smoothing=0.1)")(LOGITS, LABELS), wanted)


@pytest.mark.parametrize("given", ["'1,2,5'", "[1,2,5]", "(1, 2, 5)"])
def test_a_class_counts_as_much_as_its_weight(given: str) -> None:
    wanted = -(of_labels(log_probabilities()) * torch.tensor([1.0, 2.0, 2.0, 5.0])).mean()
    torch.testing.assert_close(loss(f"cross-entropy(class_weights={given})")(LOGITS, LABELS), wanted)


def test_balanced_weights_come_from_the_client_s_own_labels_and_have_a_mean_of_one() -> None:
    made = loss("cross-entropy(class_weights=balanced)", torch.tensor([0, 0, 0, 1]))  # no sample of the third class
    ones = torch.zeros(4, 3)
    found = torch.stack([made(ones[:1], torch.tensor([c])) for c in range(3)]) / torch.tensor(3.0).log()
    torch.testing.assert_close(found, torch.tensor([4 / (2 * 3), 4 / (2 * 1), 0.0]))
    made.begin(lambda: torch.tensor([0, 1, 2]))  # the next client
    torch.testing.assert_close(made(LOGITS, LABELS), loss("cross-entropy")(LOGITS, LABELS))


def test_focal_follows_its_formula_and_is_the_cross_entropy_at_gamma_0() -> None:
    p = of_labels(log_probabilities().exp())
    torch.testing.assert_close(loss("focal")(LOGITS, LABELS), (-((1 - p) ** 2) * p.log()).mean())
    torch.testing.assert_close(loss("focal(gamma=0)")(LOGITS, LABELS), loss("cross-entropy")(LOGITS, LABELS))


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2])
def test_focal_has_a_gradient_where_a_sample_is_certain(gamma: float) -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, 200.0, 0.0]], requires_grad=True)
    loss(f"focal(gamma={gamma})")(logits, torch.tensor([0, 0])).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("text", ["cross-entropy", "cross-entropy(label_smoothing=0.1, class_weights='1,2,5')"])
def test_the_total_is_the_mean_times_the_number_of_samples(text: str) -> None:
    made = loss(text)
    torch.testing.assert_close(made(LOGITS, LABELS, total=True), 4 * made(LOGITS, LABELS))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cros-entropy", "did you mean 'cross-entropy'?"),
        ("cross-entropy(smoothing=2)", "did you mean 'label_smoothing'?"),
        (
            "cross-entropy(class_weights=much)",
            "'class_weights' is 'much': give 'balanced', or a number from 0 for each",
        ),
        ("cross-entropy(label_smoothing=2)", "give a number from 0 to 1."),
        ("cross-entropy(class_weights='1,-2,5')", "a number from 0 for each class"),
        ("cross-entropy(class_weights='1,nan,5')", "a number from 0 for each class"),
        ("cross-entropy(class_weights=[1,[2],5])", "give 'balanced', or a number from 0 for each class"),
        ("cross-entropy(", "lacks its closing bracket"),
    ],
)
def test_one_sentence_says_what_to_give(text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError) as refused:
        requested(text)
    assert sentence in str(refused.value)


def test_weights_that_do_not_fit_the_classes_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'class_weights' has 2 numbers for 4 classes"):
        tiny.run(tmp_path / "run", loss="cross-entropy(class_weights='1,2')")
    assert not (tmp_path / "run").exists()


# -- one of one's own ------------------------------------------------------------------------------------------------
@pytest.fixture
def own() -> Iterator[None]:
    before = dict(LOSSES._entries)

    @LOSSES.register("squares")
    def squares(scale: float = 1.0) -> Loss:
        """Squared distance of the probabilities from the label."""

        def measure(logits: Tensor, labels: Tensor) -> Tensor:
            target = torch.nn.functional.one_hot(labels, logits.shape[1])
            return scale * (logits.softmax(1) - target).square().sum(1)

        return measure

    @LOSSES.register("mean-squares")
    def mean_squares() -> Loss:
        inner = squares()
        return lambda logits, labels: inner(logits, labels).mean()

    LOSSES.register("nothing")(lambda: lambda _logits, _labels: 3.0)
    LOSSES.register("wide")(lambda: lambda logits, _labels: logits)
    LOSSES.register("constant")(lambda: lambda _logits, labels: labels.float())
    LOSSES.register("failing")(lambda: lambda logits, _labels: logits[:, 99])
    yield
    LOSSES._entries = before


@pytest.mark.usefixtures("own")
def test_a_registered_function_trains(tmp_path: Path) -> None:
    runs = {name: tiny.run(tmp_path / name, loss=name) for name in ("squares", "mean-squares", "cross-entropy")}
    losses = {name: [record["loss"] for record in run.records("round")] for name, run in runs.items()}
    assert losses["squares"] == pytest.approx(losses["mean-squares"], rel=1e-6)
    assert max(losses["squares"]) < 2 < sum(losses["cross-entropy"])  # each kind of loss in its own range
    tested = runs["squares"].scores()[-1]["loss"]
    assert tested == pytest.approx(tiny_cross_entropy(runs["squares"]), rel=1e-5)  # not the squares


def tiny_cross_entropy(run: fedkeel.Run) -> float:
    """Mean over the domains of the cross-entropy on their test images, by the run's own model."""
    model, on = tiny.model(), tiny.federation()
    from safetensors.torch import load_file

    model.load_state_dict(load_file(run.directory / "model.safetensors"), strict=False)
    losses = []
    for client in on.clients:
        x, y = on.images[client.test].float() / 255, on.labels[client.test]
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(model.eval()(x).logits, y)))
    return sum(losses) / len(losses)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "no attribute 'shape'"),
        ("wide", "it must return (N,), a number for each sample"),
        ("constant", "that depends on its logits"),
        ("failing", "index 99 is out of bounds"),
    ],
)
def test_one_that_gives_something_else_is_refused_in_a_sentence(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedkeelError) as refused:
        tiny.run(tmp_path / "run", loss=name)
    assert sentence in str(refused.value)
    assert f"The loss '{name}' cannot be used" in str(refused.value)


# -- with methods and with privacy -----------------------------------------------------------------------------------
WEIGHTED = "cross-entropy(label_smoothing=0.2, class_weights='1,2,5,3')"


def client_of(text: str) -> LocalClient:
    worker = tiny.setup(network=tiny.model(norm=False), on=tiny.federation(augment=""), loss=text).worker
    return worker.begin("ward", tiny.broadcast(worker), {})


@pytest.mark.parametrize("text", ["cross-entropy", WEIGHTED, "cross-entropy(class_weights=balanced)"])
def test_the_gradients_of_samples_are_those_of_the_loss_and_their_mean_is_that_of_the_batch(text: str) -> None:
    client = client_of(text)
    batch = client.data.first_batch()
    gradients, losses = sample_gradients(client.model, *batch, client.task_loss)
    whole = client.task_loss(client.model(batch.x).logits, batch.y)
    torch.testing.assert_close(losses.mean(), whole)
    wanted = torch.autograd.grad(whole, list(client.model.parameters()))
    for (name, _), gradient in zip(client.model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(gradients[name].mean(0), gradient)


@pytest.mark.parametrize("method", ["fedprox", "fediir", "fedtan", "scaffold", "fedsam", "greg", "moon"])
@pytest.mark.slow
def test_methods_add_to_whichever_loss_it_is(method: str, tmp_path: Path) -> None:
    usual, other = (tiny.run(tmp_path / text[:15], method, loss=text, rounds=2) for text in ("cross-entropy", WEIGHTED))
    losses = [run.records("round")[-1]["loss"] for run in (usual, other)]
    assert losses[1] > 1.2 * losses[0]  # the weights are above 1
    assert all(loss < 50 for loss in losses)


def test_weights_from_the_labels_would_tell_of_them_and_are_refused_with_local_privacy() -> None:
    options: dict[str, Any] = {"dp": "local", "network": tiny.model(norm=False)}
    with pytest.raises(FedkeelError, match="weights 'balanced' by it change the others' too"):
        tiny.setup(loss="cross-entropy(class_weights=balanced)", **options)
    tiny.setup(loss=WEIGHTED, **options)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes"])
def test_every_executor_trains_on_it(executor: str, tmp_path: Path) -> None:
    text = "cross-entropy(class_weights=balanced)"
    serial, other = (tiny.run(tmp_path / name, loss=text, executor=name, threads=1) for name in ("serial", executor))
    assert tiny.result(serial) == tiny.result(other)
    plain = tiny.run(tmp_path / "plain", threads=1)
    assert tiny.result(plain)["model.safetensors"] != tiny.result(serial)["model.safetensors"]


def test_a_worker_and_its_twin_have_weights_of_their_own() -> None:
    worker = prepare(
        fedkeel.Config(**{**tiny.OPTIONS, "loss": "cross-entropy(class_weights=balanced)"}),
        federation=tiny.federation(),
        model=tiny.model(),
    ).worker
    twin = worker.twin()
    assert worker.task_loss is not twin.task_loss
    values = [w.task_loss._loss.weights for w in (worker, twin)]  # type: ignore[attr-defined]
    address = values[0].data_ptr()
    worker.begin("ward", tiny.broadcast(worker), {})
    worker.begin("clinic", tiny.broadcast(worker), {})
    assert values[0].data_ptr() == address  # where a captured step looks for it
    assert not torch.equal(*values)


TWICE = "cross-entropy(class_weights='2,2,2,2')"


@pytest.mark.parametrize(("method", "question"), [("fediir", "gradient"), ("fedtan", "derivatives 0")])
def test_what_a_method_asks_of_the_loss_is_asked_of_the_run_s(method: str, question: str) -> None:
    """Of a loss that is twice another, all gradients are twice as long."""
    moments = {"question/mean 0": torch.full((4,), 0.1), "question/var 0": torch.full((4,), 0.5)}
    answers = []
    for text in ("cross-entropy", TWICE):
        worker = tiny.setup(method, loss=text).worker
        message = tiny.broadcast(worker, extras=moments if method == "fedtan" else None)
        answers.append(worker.answer("ward", message, {}, f"{method}/{question}")[0].tensors)
    plain, twice = answers
    for name in plain.keys() - {"batches"}:
        assert plain[name].abs().max() > 0
        torch.testing.assert_close(twice[name], 2 * plain[name])


def test_fediir_s_penalty_is_of_the_gradient_of_the_run_s_loss() -> None:
    penalties = []
    for text in ("cross-entropy", TWICE):
        worker = tiny.setup("fediir(gamma=0.5)", loss=text).worker
        client = worker.begin("ward", tiny.broadcast(worker), {})
        batch = client.data.first_batch()
        penalties.append(worker.method.loss(client, batch, client.model(batch.x)))  # the mean gradient is still zero
    torch.testing.assert_close(penalties[1], 4 * penalties[0])


def test_the_examples_of_the_page_on_training_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for registry in (LOSSES, SCHEDULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fedkeel, "simulate", lambda **options: asked.append(options))
    monkeypatch.setattr(fedkeel, "resume", lambda *_, **__: None)
    names: dict[str, Any] = {"fedkeel": fedkeel}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert [options["loss"] for options in asked] == ["cross-entropy(label_smoothing=0.1)", "squares(scale=2)"]
    monkeypatch.undo()
    for registry in (LOSSES, SCHEDULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    LOSSES.register("squares")(names["squares"])
    SCHEDULES.register("halves")(names["halves"])
    run = tiny.run(tmp_path / "run", loss="squares(scale=2)", schedule="halves(at=0.4)", rounds=2)
    assert [record["learning_rate"] for record in run.records("round")] == [0.05, 0.025]
