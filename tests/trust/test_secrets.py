"""Noise that must stay a secret cannot be drawn again by who knows everything but the secret."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedkeel
from fedkeel import files as durable
from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.core.client import Batch
from fedkeel.core.messages import Broadcast, broadcast_to_bytes, update_from_bytes
from fedkeel.core.state import Tensors
from fedkeel.deploy.request_checks import Session
from fedkeel.deploy.site import Site
from fedkeel.errors import StoreError
from fedkeel.experiments.tables import Results
from fedkeel.runs.summary import SOURCES
from fedkeel.seeds import Stream
from fedkeel.trust.privacy import NoisyGradients, noisy_backward, noisy_mean
from fedkeel.trust.secrets import BYTES, FILE, Randomness, fingerprint, kept_in
from tests import tiny
from tests.deploy.loop import Loop, one_of, over_network, sites_of
from tests.trust.test_privacy import CENTRAL, needs_opacus

pytestmark = pytest.mark.slow

PRIVATE: dict[str, Any] = {"method": "gn", "dp": "local", "dp_noise": 1.0, **tiny.OPTIONS}


# -- the stream --
def test_a_stream_is_normal_and_uniform_and_the_same_for_the_same_key() -> None:
    z, u = Stream(b"key").normal(300, 1001), Stream(b"key").uniform(300, 1001)
    assert z.shape == u.shape == (300, 1001)
    assert z.dtype == u.dtype == torch.float32
    assert float(z.mean()) == pytest.approx(0, abs=0.01)
    assert float(z.double().var()) == pytest.approx(1, abs=0.02)
    assert float(z.double().pow(4).mean()) == pytest.approx(3, abs=0.1)
    assert float(z.abs().max()) > 4
    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert float(u.double().var()) == pytest.approx(1 / 12, abs=0.002)
    assert torch.equal(z, Stream(b"key").normal(300, 1001))
    assert not torch.equal(z, Stream(b"kez").normal(300, 1001))
    stream = Stream(b"key")
    assert not torch.equal(stream.normal(50), stream.normal(50))
    assert Stream(b"key").normal().shape == ()
    assert Stream(b"key").uniform(0, 3).shape == (0, 3)


def test_it_has_more_beginnings_than_can_be_tried() -> None:
    """A generator of torch on the CPU begins with 32 bits of its seed, whatever it is given."""

    def of_torch(seed: int) -> Tensor:
        return torch.randn(20, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(of_torch(7), of_torch(7 + 2**40))
    keys = [n.to_bytes(32, "little") for n in (7, 7 + 2**32, 7 + 2**40, 7 + 2**200)]
    drawn = {tuple(Stream(key).normal(20).tolist()) for key in keys}
    assert len(drawn) == len(keys)


def test_a_fingerprint_tells_names_shapes_kinds_and_bits_apart() -> None:
    plain = {"a": torch.zeros(2, 3)}
    others = [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.zeros(2, 3).index_fill(0, torch.tensor([1]), 1e-30)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(())},
        {},
    ]
    assert len({fingerprint(tensors) for tensors in [plain, *others]}) == 7
    assert fingerprint(plain) == fingerprint({"a": torch.zeros(3, 2).T})


# -- the secret --
def test_a_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = kept_in(tmp_path / FILE)
    assert len(secret) == BYTES
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert kept_in(tmp_path / FILE) == secret != kept_in(tmp_path / "other")
    (tmp_path / FILE).chmod(0o644)
    kept_in(tmp_path / FILE)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    (tmp_path / FILE).write_bytes(b"short")
    with pytest.raises(StoreError, match="has 5 bytes, and the secret that noise is drawn from has 32"):
        kept_in(tmp_path / FILE)
    monkeypatch.setenv("FEDKEEL_SECRET", "of this site alone")
    assert kept_in(tmp_path / "third") == Randomness.here().secret != b""
    assert not (tmp_path / "third").exists()
    assert "secret" not in repr(Randomness(b"secret")), "not even in the log of a crash"


# -- a site --
def a_site(state: Path, **changes: Any) -> Site:
    on = changes.pop("on", None) or tiny.federation()
    return Site(one_of(on, "ward"), state, "ward", "cpu", model=tiny.model(), **changes)


def sent() -> Broadcast:
    return tiny.broadcast(tiny.setup(**PRIVATE).worker)


def trained(site: Site, broadcast: Broadcast, **options: Any) -> Tensors:
    config = Config(**{**PRIVATE, **options}).to_dict()
    session = {"run": "r", "version": fedkeel.__version__, "config": config, "classes": list(tiny.CLASSES)}
    request = {"do": "train", "session": session, "start": 1, "step": [broadcast.round, 0], "after": None}
    table, data = site.reply(request, broadcast_to_bytes(broadcast))
    assert "failure" not in table, table
    return update_from_bytes(data).weights


def same(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_secret_is_on_disk_by_name_before_it_is_used_and_is_never_all_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", synced.append)
    kept_in(tmp_path / FILE)
    assert synced == [tmp_path]
    (tmp_path / FILE).write_bytes(bytes(BYTES))
    with pytest.raises(StoreError, match="has 32 bytes, none above 0, and the secret"):
        kept_in(tmp_path / FILE)


@needs_opacus
def test_two_sites_with_one_seed_send_different_noise_and_a_site_repeats_its_own(tmp_path: Path) -> None:
    broadcast = sent()
    first = trained(a_site(tmp_path / "a"), broadcast)
    assert same(first, trained(a_site(tmp_path / "a"), broadcast)), "started again, it draws the same"
    assert not same(first, trained(a_site(tmp_path / "b"), broadcast))
    (tmp_path / "b" / FILE).write_bytes((tmp_path / "a" / FILE).read_bytes())
    assert same(first, trained(a_site(tmp_path / "b"), broadcast)), "the secret is all that differs"
    without = a_site(tmp_path / "c")
    without.state = None
    assert not same(first, trained(without, broadcast))


@needs_opacus
def test_who_knows_the_seed_and_all_that_was_sent_cannot_draw_a_site_s_noise_again(tmp_path: Path) -> None:
    """Nor which samples took part: the sampling is half of what epsilon rests on."""
    broadcast, site = sent(), a_site(tmp_path)
    truth = trained(site, broadcast)
    assert site._worker is not None
    own = site._worker.plan("ward", 0).order
    context = site._worker.gradients.randomness.context
    for guess in (
        Randomness(),
        Randomness(b"", context),
        Randomness(b"guess", context),
        Randomness(bytes(32), context),
    ):
        server = tiny.setup(**PRIVATE).worker
        server.gradients.randomness = guess
        assert not same(server.train("ward", broadcast, {})[0].weights, truth)
        assert not torch.equal(server.plan("ward", 0).order, own)
    server.gradients.randomness = Randomness((tmp_path / FILE).read_bytes(), context)
    assert same(server.train("ward", broadcast, {})[0].weights, truth)


def other_model(broadcast: Broadcast) -> Broadcast:
    name = next(iter(broadcast.weights))
    return replace(broadcast, weights={**broadcast.weights, name: broadcast.weights[name] + 1e-6})


@needs_opacus
@pytest.mark.parametrize(
    ("change", "options"),
    [
        (other_model, {}),
        (lambda broadcast: replace(broadcast, extras={"x/y": torch.ones(1)}), {}),
        (lambda broadcast: replace(broadcast, round=1), {}),
        (lambda broadcast: broadcast, {"learning_rate": 0.06}),
        (lambda broadcast: broadcast, {"dp_clip": 1.1}),
        (lambda broadcast: broadcast, {"method": "gn(groups=1)"}),
        (lambda broadcast: broadcast, {"model": "moon_cnn"}),
        (lambda broadcast: broadcast, {"seed": 3}),
    ],
)
def test_steps_that_differ_in_anything_have_noise_of_their_own(
    tmp_path: Path, change: Callable[[Broadcast], Broadcast], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise upon both would leave their difference bare."""
    drawn: list[Tensor] = []
    usual = NoisyGradients.begin

    def watched(self: NoisyGradients, *args: Any) -> None:
        usual(self, *args)
        drawn.append(Stream(self._noise._key).normal(8))

    monkeypatch.setattr(NoisyGradients, "begin", watched)
    broadcast = sent()
    trained(a_site(tmp_path), broadcast)
    trained(a_site(tmp_path), broadcast)
    trained(a_site(tmp_path), change(broadcast), **options)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@needs_opacus
def test_other_data_have_noise_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []
    usual = NoisyGradients.begin

    def watched(self: NoisyGradients, *args: Any) -> None:
        usual(self, *args)
        keys.append(self._noise._key)

    monkeypatch.setattr(NoisyGradients, "begin", watched)
    broadcast, plain = sent(), tiny.federation()
    ward = plain["ward"]
    fewer = replace(plain, clients=[replace(ward, train=ward.train[:-1])])
    one_pixel = replace(plain, images=plain.images.clone())
    one_pixel.images[ward.train[0], 0, 0, 0] ^= 1
    for on in (plain, fewer, one_pixel):
        trained(a_site(tmp_path, on=on), broadcast)
    assert len(set(keys)) == 3


def test_samples_whose_gradients_overflow_do_not_show() -> None:
    """A server may send weights under which only some images do so."""
    model = tiny.model(norm=False)
    with torch.no_grad():
        model.head.weight.fill_(3e38)  # type: ignore[operator, union-attr]
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    config = Config(dp="local", batch_size=4, dp_noise=1.0, dp_clip=0.5)
    noisy_backward(config, Stream(b"any"), model, Batch(x * 1e30, torch.tensor([0, 1, 2])))
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert bool(torch.isfinite(gradients).all())
    assert float(gradients.norm()) < 0.5 * (3 + 2 * len(gradients) ** 0.5)


# -- a server --
def test_central_noise_differs_with_what_it_is_put_upon() -> None:
    config, origin = Config(**CENTRAL), {"w": torch.zeros(50)}
    moved = [fedkeel.core.messages.Update("x", 1, {"w": torch.full((50,), 1e-3)}, {})]
    for randomness, shared in ((Randomness(), True), (Randomness(b"secret"), False)):
        without = noisy_mean(config, origin, [], 2, 0, randomness)["w"]
        with_one = noisy_mean(config, origin, moved, 2, 0, randomness)["w"]
        assert np.allclose(with_one - without, 5e-4, atol=1e-6) == shared


@needs_opacus
def test_a_server_s_noise_is_its_own_and_its_secret_ends_with_the_run(tmp_path: Path) -> None:
    """Every site is told the seed of the run."""
    options = {**CENTRAL, "rounds": 2}
    simulated = tiny.run(tmp_path / "one", "gn", **options)
    assert tiny.result(tiny.run(tmp_path / "again", "gn", **options)) == tiny.result(simulated)
    secret: list[bytes] = []
    watch = tiny.Notes(lambda _: secret.append((tmp_path / "net" / "run" / FILE).read_bytes()))
    network = over_network(tmp_path / "net", "gn", observer=watch, **options)
    assert tiny.result(network)["model.safetensors"] != tiny.result(simulated)["model.safetensors"]
    assert len(secret) == 2
    assert len(set(secret)) == 1
    assert not (network.directory / FILE).exists()
    sources = [run.summary["randomness"] for run in (simulated, network) if run.summary]
    assert sources == ["seed", "secret"]


# -- what a run says --
@needs_opacus
def test_a_run_with_an_epsilon_says_what_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeded = tiny.run(tmp_path / "seed", "gn", dp="local", rounds=1)
    loop = Loop({node: replace(site, position=None) for node, site in
                 sites_of(tiny.federation(), tmp_path / "sites", tiny.model()).items()})  # fmt: skip
    apart = over_network(tmp_path / "net", "gn", loop=loop, dp="local", rounds=1)
    monkeypatch.setenv("FEDKEEL_SECRET", "known to one")
    secret = tiny.run(tmp_path / "secret", "gn", dp="local", rounds=1)
    for run, source in ((seeded, "seed"), (secret, "secret"), (apart, "sites")):
        assert run.summary is not None
        assert run.summary["randomness"] == source
        assert run.records("round")[-1]["randomness"] == source
        assert main(["show", str(run.directory)]) == 0
        assert SOURCES[source] in " ".join(capsys.readouterr().out.split())
        assert SOURCES[source] in Results.of([("gn", 0, run.summary)]).caption
    plain = tiny.run(tmp_path / "plain", rounds=1)
    assert plain.summary is not None
    assert "randomness" not in plain.summary
    assert "noise" not in Results.of([("fedavg", 0, plain.summary)]).caption


@needs_opacus
def test_a_run_that_was_seeded_for_a_while_rests_on_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interruption(Exception):
        pass

    def stop(round: int) -> None:
        if round == 0:
            raise Interruption

    with pytest.raises(Interruption):
        tiny.run(tmp_path / "r", "gn", dp="local", rounds=2, observer=tiny.Notes(stop))
    monkeypatch.setenv("FEDKEEL_SECRET", "known to one")
    run = tiny.resume(tmp_path / "r")
    assert [record["randomness"] for record in run.records("round")] == ["seed", "secret"]
    assert run.summary is not None
    assert run.summary["randomness"] == "seed"


def test_a_session_s_options_are_part_of_what_noise_depends_on() -> None:
    given = {"run": "r", "config": Config(**PRIVATE).to_dict(), "classes": None}
    plain = Session.read(given, None)
    other = Session.read({**given, "config": Config(**{**PRIVATE, "momentum": 0.8}).to_dict()}, None)
    assert plain.fingerprint == Session.read(given, None).fingerprint != other.fingerprint
