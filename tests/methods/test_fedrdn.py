from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.method import Method
from fedkeel.data.federation import Client, Federation
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.rounds import Federated
from fedkeel.engine.tasks import Task
from tests.methods.small import broadcast, pixels, small_federation, small_model, started
from tests.methods.steps import train

CLIENTS = ["client0", "client1", "client2"]


def pair_by_hand(x: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean over images of each channel's mean, and of its standard deviation."""
    images = x.double().numpy()
    means = [[channel.mean() for channel in image] for image in images]
    deviations = [[np.sqrt(((channel - channel.mean()) ** 2).mean()) for channel in image] for image in images]
    return np.mean(means, axis=0), np.mean(deviations, axis=0)


def ask(run: Federated) -> None:
    """As `Federated.round` begins."""
    run.server.participants = [client.name for client in run.setup.federation.clients]
    run.method.before_training(run.server)


class Look(Method):
    """Writes down what the model gets."""

    name = "look"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def inputs(self, client, x):
        self.seen.append(x.clone())
        return x


def looked_at(
    method: str, directory, federation: Federation | None = None, **options
) -> tuple[Federated, list[Tensor]]:
    look = Look()
    before = Look()
    before.name = "before"
    run = started([before, methods.build(method), look], directory, federation, **options)
    ask(run)
    train(run)
    return run, [torch.stack(pair) for pair in zip(before.seen, look.seen, strict=True)]


def pool(run: Federated) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    return [pair_by_hand(pixels(run.setup.federation, name)) for name in CLIENTS]


def used(before: Tensor, after: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean and deviation, for each channel, that make `after` of an image `before`."""
    x, y = before.double().flatten(1).numpy(), after.double().flatten(1).numpy()
    std = np.array([np.ptp(a) / np.ptp(b) for a, b in zip(x, y, strict=True)])
    return np.array([a[0] - b[0] * s for a, b, s in zip(x, y, std, strict=True)]), std


def test_each_image_is_normalised_with_the_pair_of_one_client_drawn_at_random(tmp_path):
    run, steps = looked_at("fedrdn", tmp_path, small_federation([[0, 1, 2, 3] * 20, [0, 1] * 5, [2, 3] * 7]))
    drawn = []
    for before, after in steps:
        for x, y in zip(before, after, strict=True):
            mean, std = used(x, y)
            match = [
                k
                for k, (m, s) in enumerate(pool(run))
                if np.allclose(mean, m, atol=1e-4) and np.allclose(std, s, atol=1e-4)
            ]
            assert len(match) == 1
            drawn.append(match[0])
    counts = np.bincount(drawn, minlength=3)
    assert counts.min() > 12  # of 80 images, a third each
    first = drawn[:8]
    assert len(set(first)) > 1  # within one batch


def test_it_takes_the_place_of_the_data_sets_normalisation(tmp_path):
    """Whatever the transform normalises with, the model sees the same."""
    plain = small_federation()
    transform = parse_transforms("normalise(mean=[0.1, 0.5, 0.9], std=[0.2, 1.0, 3.0])")
    other = replace(plain, train_transform=transform, test_transform=transform)
    left, right = (looked_at("fedrdn", tmp_path / str(i), f) for i, f in enumerate((plain, other)))
    for a, b in zip(left[1], right[1], strict=True):
        assert not torch.allclose(a[0], b[0])
        torch.testing.assert_close(a[1], b[1], rtol=1e-3, atol=1e-4)
    scores = [run.setup.worker.evaluate("client1", broadcast(run), {}, ["test"])[0].loss for run, _ in (left, right)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def loss_with(run: Federated, name: str, mean: NDArray[np.float64], std: NDArray[np.float64]) -> float:
    """Of the global model on the test images of a client, normalised by hand."""
    model = small_model()
    model.load_state_dict({**run.server.weights, **run.server.statistics})
    indices = run.setup.federation[name].test
    x = run.setup.federation.images[indices].double() / 255
    x = (x - torch.from_numpy(mean)[:, None, None]) / torch.from_numpy(std)[:, None, None]
    logits = model.eval()(x.float()).logits.detach()
    return float(nn.functional.cross_entropy(logits, run.setup.federation.labels[indices]))


def test_a_client_is_tested_with_its_own_pair(tmp_path):
    run = started("fedrdn", tmp_path)
    for round in range(2):
        run.round(round)
    for name in CLIENTS:
        memory = run.memory.look(name)
        found = run.setup.worker.evaluate(name, broadcast(run, 1), memory, ["test"])[0].loss
        assert found == pytest.approx(loss_with(run, name, *pair_by_hand(pixels(run.setup.federation, name))), rel=1e-4)
    tasks = [Task("evaluate", name, run.memory.look(name), splits=["test"]) for name in CLIENTS]
    assert len({result.outcome[0].loss for result in run.executor.map(tasks, broadcast(run, 1))}) == 3


def test_a_client_that_never_trained_is_tested_with_the_statistics_of_its_test_images(tmp_path):
    known = small_federation()
    stranger = Client(
        "stranger", "elsewhere", known.clients[0].train[:0], known.clients[0].train[:0], known.clients[2].test
    )
    run = started("fedrdn", tmp_path, replace(known, unseen=(stranger,)))
    run.round(0)
    images = known.images[stranger.test].float() / 255
    found = run.setup.worker.evaluate("stranger", broadcast(run), {}, ["test"])[0].loss
    assert found == pytest.approx(loss_with(run, "stranger", *pair_by_hand(images)), rel=1e-4)


def test_what_a_client_keeps_does_not_travel_and_its_pair_does_once(tmp_path):
    run = started("fedrdn", tmp_path)
    questions = []
    for round in range(3):
        run.round(round)
        questions.append(run.traffic["questions"])
    assert questions == [1, 0, 0]
    assert not any("own_normalisation" in name for name in {**run.server.weights, **run.server.statistics})
    for row, (mean, std) in zip(run.server.extras["fedrdn/pairs"], pool(run), strict=True):
        np.testing.assert_allclose(row.numpy(), np.stack([mean, std]), rtol=1e-4)


def test_clients_that_come_later_are_asked_when_they_come_and_the_table_keeps_its_shape(tmp_path):
    run = started("fedrdn", tmp_path, participation=0.34)
    asked, shapes = set(), set()
    for round in range(8):
        run.round(round)
        new = set(run.server.participants) - asked
        assert run.traffic["questions"] == (1 if new else 0)
        asked |= new
        assert int(run.server.extras["fedrdn/known"]) == len(asked)
        shapes.add(tuple(run.server.extras["fedrdn/pairs"].shape))
    assert len(asked) > 1
    assert shapes == {(3, 2, 3)}
