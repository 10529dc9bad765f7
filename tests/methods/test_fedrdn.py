from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedkeel
from fedkeel import methods
from fedkeel.core.method import Method
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Client, Federation
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.rounds import Federated
from fedkeel.engine.tasks import Task
from fedkeel.errors import MethodError
from tests import vectors
from tests.methods.small import broadcast, pixels, small_federation, small_model, started
from tests.methods.steps import rounds, train

CLIENTS = ["client0", "client1", "client2"]


def pair_by_hand(x: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean over images of each channel's mean, and of its standard deviation."""
    images = x.double().numpy()
    means = [[channel.mean() for channel in image] for image in images]
    deviations = [[np.sqrt(((channel - channel.mean()) ** 2).mean()) for channel in image] for image in images]
    return np.mean(means, axis=0), np.mean(deviations, axis=0)


def ask(run: Federated) -> None:
    """As `Federated.round` begins."""
    run.server.participants = [client.name for client in run.federation.clients]
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
    return [pair_by_hand(pixels(run.federation, name)) for name in CLIENTS]


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
    indices = run.federation[name].test
    x = run.federation.images[indices].double() / 255
    x = (x - torch.from_numpy(mean)[:, None, None]) / torch.from_numpy(std)[:, None, None]
    logits = model.eval()(x.float()).logits.detach()
    return float(nn.functional.cross_entropy(logits, run.federation.labels[indices]))


def test_a_client_is_tested_with_its_own_pair(tmp_path):
    run = started("fedrdn", tmp_path)
    for round in range(2):
        run.round(round)
    for name in CLIENTS:
        memory = run.memory.look(name)
        found = run.setup.worker.evaluate(name, broadcast(run, 1), memory, ["test"])[0].loss
        assert found == pytest.approx(loss_with(run, name, *pair_by_hand(pixels(run.federation, name))), rel=1e-4)
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


def test_stateless_clients_will_do(tmp_path):
    results = [rounds(started("fedrdn", tmp_path / str(s), stateless=s), 2)["head.weight"] for s in (False, True)]
    assert torch.equal(results[0], results[1])


def test_images_of_one_colour_are_not_divided_by_zero(tmp_path):
    federation = small_federation()
    federation.images[federation["client1"].train] = 100
    after = rounds(started("fedrdn", tmp_path, federation, learning_rate=1e-4), 2)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


@pytest.mark.parametrize("batch_size", [8, 1])
def test_missing_classes_and_single_samples(tmp_path, batch_size):
    run = started("fedrdn", tmp_path, small_federation([[0, 1, 2] * 4, [0], [2, 2]]), batch_size=batch_size)
    assert all(torch.isfinite(tensor).all() for tensor in rounds(run, 2).values())


def test_rounds_and_clients_draw_differently(tmp_path):
    look = Look()
    run = started([methods.build("fedrdn"), look], tmp_path, small_federation([[0] * 8] * 3), batch_size=8)
    run.federation.images[:] = run.federation.images[:8].repeat(3, 1, 1, 1)
    run.setup.worker.store.images[:] = run.federation.images
    run.server.extras = {"fedrdn/pairs": torch.rand(3, 2, 3) + 1, "fedrdn/known": torch.tensor(3)}
    for name, round in (("client0", 0), ("client1", 0), ("client0", 1)):
        train(run, name, round)
    sums = [x.sum(dim=(1, 2, 3)).sort().values for x in look.seen]
    assert not torch.allclose(sums[0], sums[1])
    assert not torch.allclose(sums[0], sums[2])


def test_hbn_collects_its_statistics_on_images_normalised_with_the_clients_own_pair(tmp_path):
    run = started("fedrdn+hbn(record=batch)", tmp_path)
    ask(run)
    update = train(run, "client1")
    mean, std = pair_by_hand(pixels(run.federation, "client1"))
    x = pixels(run.federation, "client1").double()
    x = (x - torch.from_numpy(mean)[:, None, None]) / torch.from_numpy(std)[:, None, None]
    weights = run.server.weights
    maps = nn.functional.conv2d(x, weights["encoder.0.weight"].double(), weights["encoder.0.bias"].double(), padding=1)
    torch.testing.assert_close(update.statistics["encoder.1.running_mean"], maps.mean(dim=(0, 2, 3)).float())


def test_what_cannot_work_is_refused():
    flat = Classifier(nn.Flatten(), nn.Linear(12, 2), 12, 2)
    methods.build("fedrdn").prepare(flat)
    with pytest.raises(MethodError, match="a layer of 12 inputs on images: choose a convolutional model"):
        flat.eval()(torch.zeros(1, 3, 2, 2))
    with pytest.raises(MethodError, match="first convolution"):
        methods.build("fedrdn").prepare(Classifier(nn.Flatten(), nn.Bilinear(2, 2, 2), 12, 2))


def test_of_vectors_each_feature_has_the_pair_of_the_client_s_own(tmp_path):
    federation = vectors.federation(test_transform="normalise(mean=1, std=2)")
    options = {"model": "mlp(hidden=4)", "rounds": 1, "batch_size": 8, "evaluation_batch": 8, "device": "cpu"}
    fedkeel.simulate(options, method="fedrdn", federation=federation, directory=tmp_path / "run")
    layer = fedkeel.load(tmp_path / "run", client="south").network.network.own_normalisation
    x = (federation.images[federation["south"].train].double() - 1) / 2
    torch.testing.assert_close(layer.pair, torch.stack([x.mean(0), x.std(0, correction=0)]).float())
    new = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(new), (new - layer.pair[0]) / layer.pair[1])
    layer.known.zero_()  # of a client that never trained: what the batch says
    torch.testing.assert_close(layer(new), (new - new.mean(0)) / new.std(0, correction=0))
