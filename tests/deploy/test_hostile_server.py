"""A server that is an enemy: it is refused before a file is opened, an address asked or a network built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel import models
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Broadcast, broadcast_to_bytes, update_from_bytes
from fedkeel.deploy import requests
from fedkeel.deploy import site as site_module
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.site import Site, own_data
from fedkeel.engine.executors.sites.channel import STEPS
from fedkeel.methods import build as build_method
from fedkeel.models import timm_models
from tests.deploy.real import CLASSES, draw_images
from tests.models.test_timm_models import Recorded

pytestmark = pytest.mark.slow

RUN = "0" * 16
Events = list[tuple[str, str]]
_watching: list[Events] = []
CODE = (sys.prefix, sys.base_prefix, "/proc", "/sys")  # of libraries that are imported late, and where they look
WATCHED = ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.mkdir", "os.rename")
PLAIN = {"data": "folder(size=16)", "model": "simple_cnn", "rounds": 3, "batch_size": 8, "device": "cpu"}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in WATCHED:
        _watching[-1].append((event, str(arguments[0])))


sys.addaudithook(_hook)  # there is no way to take one out again: it does nothing unless somebody watches


@pytest.fixture
def events() -> Iterator[Events]:
    """What the process opened or connected to, but for code of its own."""
    seen: Events = []
    _watching.append(seen)
    yield seen
    _watching.pop()


def outside(events: Events) -> Events:
    return [event for event in events if not event[1].startswith(CODE) and not event[1].endswith((".py", ".pyc"))]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw_images(root, {"north": 4})
    return root / "north"


@pytest.fixture
def site(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    return Site(own_data(images, "north"), tmp_path / "state", "north", "cpu")


def session(run: str = RUN, classes: list[str] | None = None, **options: Any) -> dict[str, Any]:
    config = {**Config().to_dict(), **PLAIN, **options}
    return {"run": run, "version": fedkeel.__version__, "config": config, "classes": classes}


def describe(site: Site, **options: Any) -> dict[str, Any]:
    return site.reply({"do": "describe", "session": session(**options)}, b"")[0]


def train(site: Site, broadcast: Broadcast, **changes: Any) -> tuple[dict[str, Any], bytes]:
    options = changes.pop("options", {})
    request = {"do": "train", "session": session(classes=list(CLASSES), **options), "step": broadcast.round * STEPS}
    return site.reply({**request, "after": -1, **changes}, broadcast_to_bytes(broadcast))


def sound_broadcast(round: int = 0, rounds: int = 3) -> Broadcast:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        entries = models.build("simple_cnn", num_classes=3, image_size=16).state_dict()
    statistics = {name: tensor for name, tensor in entries.items() if "running" in name or "num_batches" in name}
    weights = {name: tensor for name, tensor in entries.items() if name not in statistics}
    return Broadcast(round, rounds, weights, statistics)


NAMES = [
    {"model": "timm:resnet10t(checkpoint_path=/etc/shadow)"},
    {"model": "timm:resnet10t(pretrained_cfg_overlay={'url': 'http://127.0.0.1:9/x.pth'}, pretrained=true)"},
    {"model": "timm:resnet10t(pretrained_cfg={'file': '/etc/shadow'}, pretrained=true)"},
    {"model": "timm:resnet10t(pretrained=true)"},
    {"model": "timm:resnet10t(features_only=true)"},
    {"model": "timm:hf-hub:timm/resnet18"},
    {"model": "timm:local-dir:/etc"},
    {"model": "os.system"},
    {"model": "simple_cnn(weights=/etc/shadow)"},
    {"model": "simple_cnn(width={'a': 1})"},
    {"model": "resnet18(stem='../../etc/passwd')"},
    {"model": "x" * 5000},
    {"model": "simple_cnn(width=" + "[" * 1500 + ")"},
    {"method": "os.system"},
    {"method": "fedprox(mu='/etc/shadow')"},
    {"method": "+".join(["fedprox"] * 40)},
    {"method": "hbn(record={'a': 2})"},
    {"method": "hbn(stats_batch=1000000)"},
    {"data": "folder(root=/etc, size=16)"},
    {"data": "folder(size=100000)"},
    {"data": "folder(size=16, test_transform='resize(size=100000)')"},
    {"data": "folder(size=16, train_transform='flip+crop(padding=10000000)')"},
    {"data": "folder(size=16, train_transform='open(path=/etc/shadow)')"},
    {"data": "cifar10(root=/etc)"},
    {"data": "folder(size=16, partition='dirichlet(clients=3)')"},
    {"rounds": 10**9},
    {"local_epochs": 10**9},
    {"batch_size": 10**9},
    {"rounds": 10**400},
    {"learning_rate": float("nan")},
    {"learning_rate": 10**400},
    {"no_such_option": 1},
    {"seed\nserver: all is well": 1},
    {"method": None},
    {"loss": "theirs"},
    {"optimizer": "adam(betas=(2, 3))"},
    {"select_by": "x" * 5000},
]


@pytest.mark.parametrize("options", NAMES, ids=lambda options: str(options)[:60])
def test_what_a_server_may_not_name_is_refused_before_anything_is_opened_or_built(
    site: Site,
    options: dict[str, Any],
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        pytest.fail("it was built")

    timm = Recorded()
    monkeypatch.setattr(timm_models.importlib, "import_module", lambda _: timm)
    monkeypatch.setattr(site_module, "build_model", never)
    monkeypatch.setattr(models, "build_spec", never)
    monkeypatch.setattr(models, "build", never)
    for request in (
        {"do": "describe", "session": session(**options)},
        {"do": "train", "session": session(**options), "step": 0, "after": -1},
    ):
        reply, data = site.reply(request, b"")
        assert set(reply) == {"failure"}
        assert len(reply["failure"]) < 600
        assert "\n" not in reply["failure"]
        assert data == b""
    assert outside(events) == []
    assert timm.asked == []
    assert "\nserver" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"model": "simple_cnn(width=100000)"},
        {"model": "mlp(hidden=100000, layers=2)"},
        {"model": "simple_cnn(projector=1000000)"},
        {"method": "fedsr(z_dim=900000)"},
    ],
    ids=str,
)
def test_a_network_that_no_machine_holds_is_counted_and_not_built(
    site: Site, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_module, "build_model", lambda *_: pytest.fail("it was built"))
    size = {"data": "folder(size=64)"}
    assert "numbers: sites take at most 200,000,000" in describe(site, **size, **options)["failure"]
    assert "failure" in train(site, sound_broadcast(), options={**size, **options})[0]


def test_of_the_other_options_a_site_takes_none(site: Site, events: Events) -> None:
    """A server cannot say where a site computes, what it starts from, or what it writes down."""
    theirs = {"weights": "/etc/shadow", "device": "cuda:77", "executor": "processes", "workers": 99}
    theirs |= {"record": "tsne", "robust": "krum", "threads": 64}
    assert "failure" not in describe(site, **theirs)
    reply, data = train(site, sound_broadcast(), options=theirs)
    assert "failure" not in reply, reply
    assert update_from_bytes(data).samples > 0
    assert site._made is not None
    left = {name: getattr(site._made[1].config, name) for name in theirs} | {"device": "auto", "executor": "auto"}
    assert left == {name: getattr(Config(), name) for name in theirs}
    assert not [event for event in events if "shadow" in event[1]]
    assert not [event for event in events if event[0].startswith(("socket", "subprocess", "os.system"))]


@pytest.mark.parametrize(
    "change",
    [
        {"session": None},
        {"session": session() | {"version": "9.9\nnonsense"}},
        {"session": session() | {"config": [1]}},
        {"session": session() | {"run": "../../x"}},
        {"session": session() | {"classes": "abc"}},
        {"session": session() | {"classes": [str(n) for n in range(40_000)]}},
        {"session": session() | {"classes": ["../../etc"]}},
        {"do": "delete"},
        {"step": None},
        {"step": [0]},
        {"step": -1},
        {"step": STEPS},
        {"step": "0"},
        {"after": "now"},
    ],
    ids=lambda change: str(change)[:50],
)
def test_a_request_that_is_none_is_told_so_and_leaves_nothing_behind(
    site: Site, change: dict[str, Any], tmp_path: Path
) -> None:
    reply, data = train(site, sound_broadcast(), **change)
    assert set(reply) == {"failure"}
    assert data == b""
    assert not list((tmp_path / "state").glob("**/*.safetensors"))
    assert "failure" not in train(site, sound_broadcast(), options={})[0], "the site goes on"


def wrong_broadcasts() -> Iterator[tuple[str, Broadcast]]:
    sound = sound_broadcast()
    name, tensor = next(iter(sound.weights.items()))
    yield "another round", replace(sound, round=3)
    yield "more rounds", replace(sound, rounds=400)
    yield "a name too many", replace(sound, weights={**sound.weights, "more": tensor})
    yield "another shape", replace(sound, weights={**sound.weights, name: tensor[:1]})
    yield "not a number", replace(sound, weights={**sound.weights, name: tensor * torch.nan})
    yield "statistics missing", replace(sound, statistics={})


@pytest.mark.parametrize(("what", "broadcast"), list(wrong_broadcasts()), ids=lambda given: str(given)[:30])
def test_a_broadcast_must_be_of_the_model_and_of_a_round_of_the_run(
    site: Site, what: str, broadcast: Broadcast
) -> None:
    reply, _ = train(site, broadcast)
    assert reply["failure"].startswith("the server's message cannot be used"), what
    assert "failure" not in train(site, sound_broadcast())[0]


def test_a_run_of_single_images_is_refused_where_the_policy_says_so(site: Site) -> None:
    """By its splits, or by a subsample, a server could look at one image after another."""
    site.policy, halves = Policy(samples=4), "folder(size=16, validation=0, test=0.5)"
    few = [{"data": halves, "subsample": 3}, {"data": "folder(size=16, validation=0, test=0.25)"}, {}]
    parts = [describe(site, **options)["failure"] for options in few]
    assert parts == [
        f"its policy has 'samples = 4', and it is asked for 3 images to {part} on"
        for part in ("train", "test", "validate")
    ]
    assert "failure" not in describe(site, data=halves)


def test_a_failure_tells_the_server_no_path_of_the_site(
    site: Site, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_others = session(classes=["dog", "cow"])
    failure = site.reply({"do": "train", "session": of_others, "step": 0, "after": -1}, b"")[0]["failure"]
    assert "of a file or folder of its own is no class of the federation" in failure
    assert "/" not in failure
    assert str(images) in caplog.text, "the site's own log says which"
    for path in ("/home/o'brien/north", r"C:\users\brien", "state/r1"):
        assert site_module.PATH.sub("it", f"'cat' of '{path}': see 'folder'.") == "'cat' of it: see 'folder'."


@pytest.mark.parametrize("step", [None, [], ["x\n"], {"a": 1}, True], ids=str)
def test_what_a_server_asks_is_one_line_of_the_log_whatever_it_is(step: object) -> None:
    pytest.importorskip("nvflare", reason="nvflare is not installed")
    from fedkeel.deploy.executor import summary

    assert summary({"do": "train", "step": 2 * STEPS}) == "train, round 3"
    assert summary({"do": "all is well\n\x1b[2Jserver", "step": step}) == "all is well[2Jserver"


@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
def test_an_honest_server_may_ask_for_a_network_of_timm(site: Site, events: Events) -> None:
    assert "failure" not in describe(site, model="timm:resnet10t(drop_rate=0.1)", method="hbn")
    assert "failure" not in describe(site, model="timm:levit_128s", data="folder(size=64)")
    assert not [event for event in events if event[0].startswith("socket")]


def test_every_method_can_be_counted_without_memory(images: Path) -> None:
    """Otherwise a sound method would be refused."""
    from fedkeel.data.site import load_site
    from fedkeel.methods import METHODS

    federation = load_site(images, "north", Config(data="folder(size=16)"))
    for method in METHODS.names():
        if not Composition.of(build_method(method)).is_pooled:
            requests.check_network(Config(method=method), federation)
