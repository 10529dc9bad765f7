"""A model for one site: a copy that fits the look of its images, that comes back from a file, and says how it came to
be. The rule itself is tested in tests/formulas and tests/nn."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

import fedkeel
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import normalised_layers
from fedkeel.runs.calibrated import Calibrated
from fedkeel.runs.export import FORMATS
from fedkeel.runs.run import Run
from fedkeel.runs.trained import as_tested
from tests import tiny
from tests.runs.test_export import inside, needs_onnx, outputs

ON = tiny.federation({"ward": 60, "clinic": 60, "hospital": 60}, test=40)


def small(network: nn.Module | None = None, *, seed: int = 0) -> nn.Module:
    """A network that has seen something: its statistics are not (0, 1)."""
    network = network or tiny.model(seed)
    with torch.no_grad():
        network.train()
        for _ in range(40):
            network(torch.rand(16, 3, 8, 8))
    return network.eval()


def dark(images: Tensor) -> Tensor:
    """The same pictures, as another device would take them."""
    return images // 3 + 150


def state_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @cache
    def run(method: str = "fedavg", seed: int = 0) -> Run:
        directory = tmp_path_factory.mktemp("runs") / method
        return tiny.run(directory, method, on=ON, rounds=12, learning_rate=0.2, seed=seed)

    return run


def foreign(on: Federation = ON) -> tuple[Tensor, Tensor]:
    """Images of a client that look different, and their labels."""
    indices = on["hospital"].train
    return dark(on.images[indices]), on.labels[indices]


def accuracy(said: Any, labels: Tensor) -> float:
    return float((said.probabilities.argmax(1) == labels).double().mean())


# -- what comes of it ------------------------------------------------------------------------------------------------
def test_images_that_look_different_are_classified_better(trained: Callable[..., Run]) -> None:
    run, (images, labels) = trained(), foreign()
    site = fedkeel.calibrate(run, images)
    assert site.trained is not None
    before, after = run.predict(images), site.trained.predict(images)
    assert accuracy(after, labels) > accuracy(before, labels)
    assert site.changed == sum(a != b for a, b in zip(before.classes, after.classes, strict=True)) > 0
    assert site.calibration.images == len(images)
    assert str(site.changed) in str(site)
    assert str(site).startswith(str(site.calibration))


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn"])
def test_it_is_what_the_evaluation_does_on_the_same_images(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"learning_rate": 0.2, "evaluate_with": "site", "site_images": 0, "evaluation_batch": 16}
    run = tiny.run(tmp_path, method, on=ON, **options)
    found = {r["client"]: r["loss"] for r in run.records("evaluation") if r["split"] == "test"}  # of the last round
    for client in ON.clients:
        site = fedkeel.calibrate(run, ON.images[client.train], client=client.name if method == "fedbn" else None)
        assert site.calibration.share > 0
        with torch.no_grad():
            logits = site.model(as_tested(ON.test_transform, ON.images[client.test])).logits
        loss = nn.functional.cross_entropy(logits, ON.labels[client.test])
        assert float(loss) == pytest.approx(found[client.name], rel=1e-4)


def test_statistics_move_by_the_share_that_is_told(trained: Callable[..., Run]) -> None:
    """Of the first layer, whose input no other layer's statistics change."""
    run, (images, _) = trained(), foreign()
    site = fedkeel.calibrate(run, images, prior=20)
    name, share = "encoder.1", site.calibration.share
    assert 0 < share < len(images) / (len(images) + 20)
    x = run.model().encoder[0](run.trained().preprocess(images)).double()  # type: ignore[index]
    for buffer, own in (("running_mean", x.mean((0, 2, 3))), ("running_var", x.var((0, 2, 3), correction=0))):
        old = run.model().get_buffer(f"{name}.{buffer}").double()
        torch.testing.assert_close(
            site.model.get_buffer(f"{name}.{buffer}").double(), old + share * (own - old), rtol=1e-4, atol=1e-5
        )


def test_images_of_the_federation_leave_a_copy_that_is_the_same_to_the_bit() -> None:
    network = small()
    images = torch.rand(200, 3, 8, 8)
    with torch.no_grad():
        x = network.encoder[0](images)  # type: ignore[index, operator]
        network.encoder[1].running_mean.copy_(x.mean((0, 2, 3)))  # type: ignore[index, union-attr, operator]
        network.encoder[1].running_var.copy_(x.var((0, 2, 3)))  # type: ignore[index, union-attr, operator]
    site = fedkeel.calibrate(network, images)
    assert site.calibration.share == 0
    assert site.changed == 0
    assert site.model is not network
    assert same(site.model.state_dict(), network.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_what_is_given_stays_as_it_is(training: bool, trained: Callable[..., Run]) -> None:
    network = small().train(training)
    before = state_of(network)
    site = fedkeel.calibrate(network, torch.rand(40, 3, 8, 8) + 3, always=True)
    assert same(network.state_dict(), before)
    assert network.training is training
    assert not any(module.training for module in site.model.modules())
    assert not same(site.model.state_dict(), before)
    changed = {name for name in before if not torch.equal(before[name], site.model.state_dict()[name])}
    assert changed == {"encoder.1.running_mean", "encoder.1.running_var"}
    run = trained()
    files, given = tiny.result(run), run.trained()
    before = state_of(given.network)
    assert fedkeel.calibrate(given, foreign()[0]).changed
    assert same(given.network.state_dict(), before)
    assert tiny.result(run) == files


def test_every_way_to_give_images_is_the_same(trained: Callable[..., Run], tmp_path: Path) -> None:
    run, (images, _) = trained(), foreign()
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:03}.png")
    (tmp_path / "notes.txt").write_text("no image")
    floats = run.trained().preprocess(images)
    ways: list[Any] = [images, images.permute(0, 2, 3, 1).numpy(), tmp_path, str(tmp_path), floats, floats.numpy()]
    ways += [sorted(tmp_path.glob("*.png")), [Image.open(file) for file in sorted(tmp_path.glob("*.png"))]]
    first = fedkeel.calibrate(run, images)
    for way in ways:
        found = fedkeel.calibrate(run, way)
        assert found.to_dict() == first.to_dict()
        assert same(found.model.state_dict(), first.model.state_dict())
    network = run.model()
    for given in (floats, [floats[:64], floats[64:]], iter([(floats, torch.zeros(len(floats)))])):
        assert same(fedkeel.calibrate(network, given).model.state_dict(), first.model.state_dict())
    of_trained = fedkeel.calibrate(run.trained(), images)
    assert same(of_trained.model.state_dict(), first.model.state_dict())


def test_more_images_than_a_batch_are_one_site() -> None:
    network, images = small(), torch.rand(150, 3, 8, 8) + 1
    whole, turned = fedkeel.calibrate(network, images), fedkeel.calibrate(network, images.flip(0))
    assert whole.calibration.images == 150
    torch.testing.assert_close(whole.model.state_dict(), turned.model.state_dict())


class Norms(nn.Module):
    """Normalisation of every kind, and logits as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, momentum=None)
        self.batch, self.flat = nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm1d(12)
        self.unused, self.head = nn.BatchNorm3d(2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch(self.two(torch.relu(self.one(x))))
        return self.head(self.flat(x.flatten(1)))  # type: ignore[no-any-return]


def test_every_kind_of_batch_norm_is_calibrated_or_left_alone() -> None:
    network = Norms()
    site = fedkeel.calibrate(network, torch.rand(30, 3, 2, 2) + 2, always=True)
    assert list(site.calibration.layers) == ["one", "two", "flat"]
    old, new = normalised_layers(network), normalised_layers(site.model)
    moved = [name for name in old if not torch.equal(old[name].running_mean, new[name].running_mean)]  # type: ignore
    assert moved == ["one", "two", "flat"]


@pytest.mark.parametrize("method", ["hbn", "fedwon+hbn", "fedbn"])
def test_methods_with_layers_of_their_own(method: str, trained: Callable[..., Run], tmp_path: Path) -> None:
    run, (images, _) = trained(method), foreign()
    client = "hospital" if method == "fedbn" else None
    site = fedkeel.calibrate(run, images, client=client)
    file = site.save(tmp_path / "site.safetensors")
    # In place of the run's own file, with the layers that the client keeps.
    assert safetensors.torch.load_file(file).keys() == run.model(client).state_dict().keys()
    back = fedkeel.load(run.directory, model=tiny.model(), calibrated=file)
    assert site.trained is not None
    assert torch.equal(back.predict(images).probabilities, site.trained.predict(images).probabilities)
    if client:
        with pytest.raises(FedkeelError, match="say whose with --client"):
            fedkeel.calibrate(run, images)
        with pytest.raises(FedkeelError, match="or of another client's"):
            fedkeel.load(run.directory, model=tiny.model(), client="ward", calibrated=file)


@pytest.mark.parametrize("method", ["gn", "fedwon"])
def test_without_statistics_there_is_nothing_to_calibrate(method: str, trained: Callable[..., Run]) -> None:
    with pytest.raises(FedkeelError, match="has no layer with running statistics"):
        fedkeel.calibrate(trained(method), foreign()[0])


# -- files -----------------------------------------------------------------------------------------------------------
def test_a_file_brings_the_model_back_and_says_how_it_was_made(trained: Callable[..., Run], tmp_path: Path) -> None:
    run, (images, _) = trained(), foreign()
    site = fedkeel.calibrate(run, images, prior=8)
    file = site.save(tmp_path / "north.safetensors")
    back = fedkeel.load(run.directory, model=tiny.model(), calibrated=file)
    assert site.trained is not None
    assert torch.equal(back.network(back.preprocess(images)), site.trained.network(back.preprocess(images)))
    card = json.loads((tmp_path / "north.safetensors.json").read_text())
    with safetensors.safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["fedkeel.json"]) == card
    record = card["calibration"]
    assert record == json.loads(json.dumps(site.to_dict()))
    assert (record["images"], record["prior"], record["changed"]) == (len(images), 8, site.changed)
    assert record["distance"] > record["explained"] > 0
    assert sum(record["mix"]) == pytest.approx(1)
    assert card["classes"] == list(tiny.CLASSES)
    assert card["accuracy"] is None  # that of the run is of another model
    # Its tensors take the place of the run's own.
    network = run.model()
    network.load_state_dict(safetensors.torch.load_file(file))
    assert same(network.state_dict(), site.model.state_dict())


def test_a_file_is_of_one_run(trained: Callable[..., Run], tmp_path: Path) -> None:
    file = fedkeel.calibrate(trained(), foreign()[0]).save(tmp_path / "a.safetensors")
    other = trained(seed=1)
    with pytest.raises(FedkeelError, match="was not made of the model in"):
        fedkeel.load(other.directory, model=tiny.model(), calibrated=file)
    alone = fedkeel.calibrate(trained().trained(), foreign()[0]).save(tmp_path / "b.safetensors")
    with pytest.raises(FedkeelError, match="was not made of the model in"):
        fedkeel.load(trained().directory, model=tiny.model(), calibrated=alone)
    own = trained().directory / "model.safetensors"
    for number, text in enumerate(["{", "[]", '{"calibration": 3}', '{"calibration": {}, "client": 7}', "[" * 100_000]):
        data = safetensors.torch.save({"x": torch.ones(1)}, metadata={"fedkeel.json": text})
        (tmp_path / f"{number}.safetensors").write_bytes(data)
    strange = list(tmp_path.glob("?.safetensors"))
    strange.remove(file)
    strange.remove(alone)
    for wrong in (tmp_path / "gone", tmp_path, tmp_path / "a.safetensors.json", own, *strange):
        with pytest.raises(FedkeelError, match="give a file that 'fedkeel calibrate' wrote"):
            fedkeel.load(trained().directory, model=tiny.model(), calibrated=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("format", [pytest.param("onnx", marks=needs_onnx), "pt2"])
def test_what_runs_without_fedkeel_gives_the_same_logits(
    format: str, transform: bool, trained: Callable[..., Run], tmp_path: Path
) -> None:
    run, (images, _) = trained("fedwon+hbn"), foreign()
    site = fedkeel.calibrate(run, images)
    file = site.save(tmp_path / f"a{FORMATS[format]}", with_transform=transform)
    assert site.trained is not None
    floats = site.trained.preprocess(images[:5])
    expected = site.trained.network(floats)
    said = outputs(file, format, images[:5] if transform else floats)
    torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, run.trained().network(floats), atol=1e-2)
    card = json.loads(file.with_name(f"{file.name}.json").read_text())
    assert card["calibration"]["images"] == len(images)
    assert json.loads(inside(file, format)) == card


@needs_onnx
def test_a_plain_network_is_written_too(tmp_path: Path) -> None:
    images = torch.rand(30, 3, 2, 2) + 2
    site = fedkeel.calibrate(Norms(), images)
    assert site.trained is None
    site.save(tmp_path / "a.safetensors")
    assert json.loads((tmp_path / "a.safetensors.json").read_text())["classes"] == ["0", "1"]
    with pytest.raises(FedkeelError, match="is not known here"):
        site.save(tmp_path / "a.onnx", with_transform=True)
    network = small()
    site = fedkeel.calibrate(network, torch.rand(30, 3, 8, 8) + 2)
    file = site.save(tmp_path / "b.onnx")
    x = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(outputs(file, "onnx", x), site.model(x).logits, rtol=1e-4, atol=1e-4)


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    site = fedkeel.calibrate(small(), torch.rand(30, 3, 8, 8))
    for name, told in (("a.bin", "ends in .safetensors, .onnx"), ("no/a.onnx", "its folder does not exist")):
        with pytest.raises(FedkeelError, match=told):
            site.save(tmp_path / name)
    with pytest.raises(FedkeelError, match="tensors alone"):
        site.save(tmp_path / "a.safetensors", with_transform=True)
    assert list(tmp_path.iterdir()) == []


# -- what is wrong ---------------------------------------------------------------------------------------------------
GOOD = torch.rand(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("images", "options", "told"),
    [
        (GOOD, {"prior": -1}, "'prior' is -1: give at least 0"),
        (GOOD, {"prior": float("nan")}, "finite"),
        (GOOD, {"prior": "many"}, "'prior' is 'many'"),
        (GOOD, {"always": "no"}, "'always' is 'no', which is not"),
        (GOOD, {"client": "ward"}, "is one of a run"),
        (GOOD[:0], {}, "There is no image to calibrate with"),
        ([], {}, "There is no image to calibrate with"),
        (GOOD.to(torch.uint8), {}, "give a float tensor"),
        (torch.tensor(1.0), {}, "give a float tensor"),
        ("folder", {}, "give a float tensor"),
        (3, {}, "give a float tensor"),
        (torch.full_like(GOOD, torch.nan), {}, "not a finite number"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(images: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(FedkeelError, match=told):
        fedkeel.calibrate(small(), images, **options)


@pytest.mark.parametrize("model", [3, None, {}, tiny.model])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(FedkeelError, match=r"'model' is .*: give a run"):
        fedkeel.calibrate(model, GOOD)
    with pytest.raises(FedkeelError, match="does not give logits"):
        fedkeel.calibrate(nn.BatchNorm2d(3), GOOD)


def test_images_of_a_run_that_cannot_be_used(trained: Callable[..., Run], tmp_path: Path) -> None:
    run = trained()
    for images, told in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path, "There is no image to calibrate with"),
        (torch.rand(4, 3, 9, 9), r"give a float tensor as the network takes it, \(N, 3, 8, 8\)"),
        ([torch.rand(3, 8, 8)], "give uint8"),
    ):
        with pytest.raises(FedkeelError, match=told):
            fedkeel.calibrate(run, images)
    with pytest.raises(FedkeelError, match="not a run directory"):
        fedkeel.calibrate(tmp_path, GOOD)
    with pytest.raises(FedkeelError, match="one model for all clients"):
        fedkeel.calibrate(run, foreign()[0], client="ward")
    (tmp_path / "a.png").write_text("broken")
    with pytest.raises(FedkeelError, match=r"a.png' cannot be read"):
        fedkeel.calibrate(run, tmp_path)
    with pytest.raises(FedkeelError, match=r"There is no image to calibrate with \(The image"):
        fedkeel.calibrate(run, tmp_path, tolerate=True)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "b.png")
    site = fedkeel.calibrate(run, tmp_path, tolerate=True)
    assert isinstance(site, Calibrated)
    assert (site.calibration.images, list(site.unreadable)) == (1, [str(tmp_path / "a.png")])


def test_rows_of_numbers_are_read_as_for_predict(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows, labels = generator.normal(size=(80, 5)).astype(np.float32), np.arange(80) % 2
    federation = fedkeel.data.federation(rows, labels, clients=np.arange(80) // 40, name="rows")
    run = fedkeel.simulate(
        federation=federation, model="mlp", directory=tmp_path / "run", rounds=1, executor="serial", device="cpu"
    )
    other = generator.normal(size=(50, 5)).astype(np.float32) + 4
    np.save(tmp_path / "rows.npy", other)
    site = fedkeel.calibrate(run, tmp_path / "rows.npy")
    assert same(site.model.state_dict(), fedkeel.calibrate(run, other).model.state_dict())
    assert site.calibration.images == 50
    assert site.calibration.share > 0
