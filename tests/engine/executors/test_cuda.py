"""The executor `cuda` gives what `serial` gives on the same GPU, for every method and clients of unequal size.

Where there is no GPU, on a pretended one (`pretended.py`), and then bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedkeel import simulate
from fedkeel.config import Config
from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.data.federation import Client, Federation, no_indices
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine import batches
from fedkeel.engine.executors.cuda.slot import Changed, copy_into
from fedkeel.methods import METHODS
from fedkeel.models import Classifier
from tests import tiny
from tests.engine.executors.pretended import pretend
from tests.methods.together import VARIANTS

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
EXTRA = ["fedprox+greg", "fedwon+hbn", "fedprox+hbn", "greg(mode=mix-learned)", "fedcoda(calibrate_from=0)"]
EXTRA += ["scaffold+hbn", "moon+greg", "moon+hbn", "fedsam+greg", "fedsam+hbn", "fedacg+hbn"]
EXTRA += ["fedfm(from_round=1)", "fedrdn+hbn", "fedplvm(lambda_=1)+greg"]
SAMPLES = (1, 3, 37, 120, 200)


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPU of this machine, or a pretended one."""
    return SimpleNamespace(device="cuda") if HAS_GPU else pretend(monkeypatch.setattr)


def assert_same(expected: dict[str, Tensor], models: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    """Up to the roundings of a GPU; a pretended one has none of its own."""
    for name, tensor in expected.items():
        difference = (tensor.double() - models[name].double()).abs().max()
        assert difference <= tolerance * HAS_GPU * tensor.double().abs().max().clamp(min=1e-3), name


def uneven_federation() -> Federation:
    generator = torch.Generator().manual_seed(7)
    total = sum(SAMPLES) + 40
    labels = torch.randint(0, 4, (total,), generator=generator)
    images = torch.randint(0, 128, (total, 3, 16, 16), generator=generator)
    images = (images + 30 * labels[:, None, None, None]).to(torch.uint8)
    clients, start = [], 0
    test = torch.arange(sum(SAMPLES), total)
    for samples in SAMPLES:
        indices = torch.arange(start, start + samples)
        clients.append(Client(f"has-{samples}", f"domain-{samples}", indices, no_indices(), test))
        start += samples
    return Federation(
        "uneven",
        images,
        labels,
        ("a", "b", "c", "d"),
        tuple(clients),
        parse_transforms("crop(padding=2)+flip+normalise(mean=0.5, std=0.25)"),
        parse_transforms("normalise(mean=0.5, std=0.25)"),
    )


def large_federation(clients: int, samples: int, pixels: int) -> Federation:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (clients * samples, 3, pixels, pixels), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (len(images),), generator=generator)
    sites = [
        Client(f"c{i}", "one", torch.arange(i * samples, (i + 1) * samples), no_indices(), torch.arange(64))
        for i in range(clients)
    ]
    transform = parse_transforms("normalise(mean=0.5, std=0.25)")
    return Federation("large", images, labels, ("a", "b", "c", "d"), tuple(sites), transform, transform)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [*METHODS.names(), *map(slow, [*EXTRA, *VARIANTS])])
def test_two_rounds_under_cuda_equal_two_rounds_under_serial(method: str, card: Any, tmp_path: Path) -> None:
    models = {}
    for executor in ("serial", "cuda"):
        run = simulate(
            Config(
                rounds=2,
                batch_size=8,
                learning_rate=0.01,
                momentum=0.9,
                precision="float32",
                device=card.device,
                executor=executor,
                method=method,
            ),
            model="simple_cnn(width=4)" if HAS_GPU else tiny.model(),
            federation=uneven_federation(),
            directory=tmp_path / executor,
        )
        models[executor] = load_file(run.directory / "model.safetensors")
    assert_same(models["serial"], models["cuda"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "adamw",
        *map(slow, ["sgd(nesterov=true)", "adam(betas=(0.8, 0.9))", "rmsprop", "nadam", "asgd", "adagrad"]),
    ],
)
def test_schedules_and_optimisers_act_in_captured_steps(optimizer: str, card: Any, tmp_path: Path) -> None:
    models = {}
    for executor in ("serial", "cuda"):
        run = simulate(
            rounds=4,
            batch_size=8,
            learning_rate=0.003,
            schedule="exponential(decay=0.5)",
            weight_decay=0.01,
            clip_norm=1.0,
            loss="cross-entropy(label_smoothing=0.1, class_weights=balanced)",
            optimizer=optimizer,
            local_epochs=2,
            model="simple_cnn(width=4)" if HAS_GPU else tiny.model(),
            precision="float32",
            device=card.device,
            executor=executor,
            federation=uneven_federation(),
            directory=tmp_path / executor,
        )
        models[executor] = load_file(run.directory / "model.safetensors")
    assert_same(models["serial"], models["cuda"], 1e-3)


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_with_little_memory_left_runs_fewer_clients_at_once(tmp_path: Path, caplog: Any) -> None:
    """Both where too many slots are asked for, and where a trial finds out how many there may be."""
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 64, "model": "resnet18", "executor": "cuda"}
    # Convolutions may be done in other ways where memory is short: small steps, so that roundings stay small.
    settings |= {"device": "cuda", "precision": "float32", "learning_rate": 1e-4}
    federation = large_federation(clients=8, samples=704, pixels=64)
    models = [simulate(**settings, federation=federation, directory=tmp_path / "plenty")]
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    for workers in (8, 0):
        # room for about three slots of a gigabyte or so
        torch.cuda.set_per_process_memory_fraction((total - free + 3 * 2**30) / total)
        try:
            directory = tmp_path / f"little-{workers}"
            models.append(simulate(**settings, workers=workers, federation=federation, directory=directory))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
    assert "fewer clients at once" in caplog.text
    expected, *others = [load_file(run.directory / "model.safetensors") for run in models]
    for other in others:
        for name, tensor in expected.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(HAS_GPU, reason="the test above has a real one")
@pytest.mark.parametrize(("workers", "free"), [(5, 0), (0, 2**30)], ids=["as many as asked for", "by a trial"])
def test_where_slots_do_not_fit_there_are_fewer_and_the_same_results(
    workers: int, free: int, tmp_path: Path, card: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    card.most_pools, card.free = 2, free
    runs = [
        tiny.run(tmp_path / how, on=uneven_federation(), executor=how, rounds=1, **options)
        for how, options in (("serial", {}), ("cuda", {"workers": workers}))
    ]
    assert ("going on with 2" in caplog.text) == (workers > 0)
    assert ("1 clients at once: a step alone takes" in caplog.text) == (workers == 0)
    assert tiny.result(runs[0])["model.safetensors"] == tiny.result(runs[1])["model.safetensors"]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("executor", ["serial", "cuda"])
def test_images_that_do_not_fit_are_streamed(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {}
    for share in (0.5, 0.0):
        monkeypatch.setattr(batches, "IMAGES_SHARE", share)
        run = simulate(
            rounds=2,
            batch_size=8,
            model="simple_cnn(width=4)",
            precision="float32",
            device="cuda",
            executor=executor,
            method="hbn",
            federation=uneven_federation(),
            directory=tmp_path / str(share),
        )
        models[share] = load_file(run.directory / "model.safetensors")
    for name, tensor in models[0.5].items():
        assert torch.equal(models[0.0][name], tensor), name


def dropping(layer: Callable[[], nn.Module]) -> Classifier:
    """With one dropout used twice."""
    torch.manual_seed(1)
    shared = layer()
    encoder = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(),
        shared, nn.Linear(128, 32), shared, nn.ReLU(),
    )  # fmt: skip
    return Classifier(encoder, nn.Linear(32, 4), 32, 4)


def trained(
    directory: Path, card: Any, executor: str, layer: Callable[[], nn.Module], **options: Any
) -> dict[str, Tensor]:
    settings: dict[str, Any] = {"rounds": 2, "batch_size": 8, "learning_rate": 0.01}
    settings |= {"workers": 0 if executor == "serial" else 4}
    settings |= {"momentum": 0.9, "precision": "float32", "device": card.device, "executor": executor}
    run = simulate(
        **{**settings, **options}, model=dropping(layer), federation=uneven_federation(), directory=directory
    )
    return load_file(run.directory / "model.safetensors")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", slow("greg"), slow("fedsam")])
def test_a_model_that_draws_by_itself_trains_as_under_serial_and_says_so(
    method: str, card: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = {
        how: trained(tmp_path / how, card, how, lambda: nn.RReLU(0.1, 0.5), method=method) for how in ("serial", "cuda")
    }
    assert_same(models["serial"], models["cuda"])
    assert "not as captured graphs: the model or the method draws from torch's default generator." in caplog.text


@pytest.mark.gpu
def test_dropout_repeats_from_run_to_run_and_is_not_on_in_vain(card: Any, tmp_path: Path) -> None:
    first, again, none = (
        trained(tmp_path / str(i), card, "cuda", lambda p=p: nn.Dropout(p), learning_rate=0.001)  # type: ignore[misc]
        for i, p in enumerate((0.5, 0.5, 0.0))
    )
    for entry, tensor in first.items():
        torch.testing.assert_close(again[entry], tensor, rtol=1e-4, atol=1e-6)
    assert (first["head.weight"] - none["head.weight"]).abs().max() > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", slow("greg"), slow("fedsam")])
def test_masks_do_not_depend_on_who_trains_beside(method: str, card: Any, tmp_path: Path) -> None:
    alone, together = (
        trained(tmp_path / str(n), card, "cuda", lambda: nn.Dropout(0.5), method=method, workers=n) for n in (1, 4)
    )
    assert_same(alone, together)


class Masks(Method):
    """Sends the masks that its last steps saw, of 64 ones each."""

    name = "masks"
    traits = Traits(capturable=True)

    def start(self, client: LocalClient) -> None:
        client.scratch["seen"] = torch.zeros(16, 64, device=next(client.model.parameters()).device)
        client.scratch["layer"] = [client.model.encoder[5]]

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        seen = client.scratch["seen"]
        seen.copy_(torch.cat([seen[1:], (client.scratch["layer"][0](torch.ones_like(seen[:1])) != 0).float()]))
        return x

    def finish(self, client: LocalClient) -> dict[str, Tensor]:
        return {"seen": client.scratch["seen"].clone()}

    def extras(self, server: Server, updates: Sequence[Update]) -> dict[str, Tensor]:
        self.sent = {update.client: update.extras["seen"].cpu() for update in updates}
        return {}


@pytest.mark.gpu
def test_clients_side_by_side_have_masks_of_their_own(card: Any, tmp_path: Path) -> None:
    method = Masks()
    trained(tmp_path, card, "cuda", lambda: nn.Dropout(0.5), method=method)
    assert len({tuple(masks.flatten().tolist()) for masks in method.sent.values()}) == len(SAMPLES)


def test_tensors_are_copied_to_where_a_captured_step_looks_for_them() -> None:
    old = {"a": torch.zeros(3), "b": [torch.zeros(2), 5]}
    address = old["a"].data_ptr()
    copy_into(old, {"a": torch.ones(3), "b": [torch.full((2,), 2.0), 5]})
    assert old["a"].tolist() == [1, 1, 1]
    assert old["a"].data_ptr() == address
    assert old["b"][0].tolist() == [2, 2]


@pytest.mark.parametrize(
    "new",
    [
        {"a": torch.ones(4), "b": 5},
        {"a": torch.ones(3), "b": 6},
        {"a": torch.ones(3)},
        {"a": torch.ones(3, dtype=torch.float64), "b": 5},
    ],
    ids=["shape", "number", "names", "dtype"],
)
def test_a_step_that_refers_to_something_else_is_not_replayed(new: dict[str, object]) -> None:
    with pytest.raises(Changed):
        copy_into({"a": torch.zeros(3), "b": 5}, new)
