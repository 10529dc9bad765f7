"""A site's policy: what it says, how it is read, and that both ends are told what it refuses."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.deploy import requests
from fedkeel.deploy.policy import Policy
from fedkeel.errors import FedkeelError
from tests import tiny
from tests.deploy.loop import Loop, in_one_process, over_network, sites_of
from tests.trust.test_privacy import needs_opacus

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "deploy.md"


def written(path: Path, text: str) -> Path:
    file = path / "policy.toml"
    file.write_text(text)
    return file


def test_the_default_policy_is_printed_as_a_file_that_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "--show-policy"]) == 0
    text = capsys.readouterr().out
    assert Policy.read(written(tmp_path, text)) == Policy()
    assert all(f"\n{entry.name} = " in text for entry in fields(Policy))


def test_the_page_on_deployment_shows_every_line_of_a_policy(tmp_path: Path) -> None:
    (block,) = [part.partition("```")[0] for part in DOCS.read_text().split("```toml\n") if "# policy.toml" in part]
    Policy.read(written(tmp_path, block))
    shown = [line.partition(" =")[0] for line in block.splitlines() if " = " in line]
    assert shown == [entry.name for entry in fields(Policy)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("round = 3", "There is no 'round' in a policy: did you mean 'rounds'?"),
        ("rounds = 0", "'rounds' is 0: give at least 1."),
        ("by_class = 1", "'by_class' is 1, which is not true or false."),
        ("dp = 'locl'", "'dp' is 'locl': did you mean 'local'?"),
        ("methods = 3", "'methods' is 3, which is not text"),
        ("epsilon = 3.0", "'epsilon' does nothing without 'dp = \"local\"'"),
        ("rounds", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_policy_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError) as wrong:
        Policy.read(written(tmp_path, text))
    assert sentence in str(wrong.value)


@pytest.mark.parametrize(
    ("line", "config", "asked_for"),
    [
        ('methods = "fedavg, fedcm"', {"method": "fedavg+gn"}, "'gn'"),
        ("rounds = 5", {"rounds": 6}, "6 rounds"),
        ('dp = "central"', {}, "'dp = \"none\"'"),
        ("samples = 8", {"method": "hbn(stats_samples=2)"}, "2 images as 'stats_samples' of 'hbn'"),
    ],
)
def test_each_line_refuses_what_is_beyond_it_and_is_named(
    tmp_path: Path, line: str, config: dict[str, Any], asked_for: str
) -> None:
    policy = Policy.read(written(tmp_path, f"# ours\n\n{line}\n"))
    with pytest.raises(FedkeelError) as refused:
        requests.check(Config(**{"data": "folder", **config}), policy)
    assert str(refused.value) == f"its policy has '{line}', and it is asked for {asked_for}"


def test_a_site_that_refuses_sits_out_and_both_ends_say_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    loop.at["clinic"].policy = Policy(rounds=2)
    notes = tiny.Notes()
    run = over_network(tmp_path, loop=loop, observer=notes, rounds=3)
    why = "its policy has 'rounds = 2', and it is asked for 3 rounds"
    assert f"The site 'clinic' sits out: {why}." in notes.notes
    assert why in caplog.text
    assert set(run.summary["domains"]) == {"bright", "tinted"}  # type: ignore[index]


def test_where_too_few_are_left_the_server_ends_and_says_why(tmp_path: Path) -> None:
    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    for site in loop.at.values():
        site.policy = Policy(rounds=2)
    with pytest.raises(FedkeelError, match=r"No site can take part .*it is asked for 3 rounds"):
        over_network(tmp_path / "all", loop=loop, rounds=3)
    loop.at["ward"].policy = Policy()
    with pytest.raises(FedkeelError, match="'min_clients' is 2, but a round trains 1"):
        over_network(tmp_path / "two", loop=loop, rounds=3, min_clients=2)


def test_an_evaluation_can_be_refused(tmp_path: Path) -> None:
    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    loop.at["clinic"].policy = Policy(evaluation=False)
    notes = tiny.Notes()
    over_network(tmp_path, loop=loop, observer=notes, rounds=1)
    assert any("'clinic'" in note and "its policy has 'evaluation = false'" in note for note in notes.notes)


# -- the account of privacy --
PRIVATE = {"dp": "local", "dp_noise": 1.5, "rounds": 2}


@needs_opacus
def test_a_run_that_would_spend_too_much_is_refused_before_it_begins(tmp_path: Path) -> None:
    from fedkeel.trust import privacy

    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    whole = privacy.spent(Config(**{**tiny.OPTIONS, **PRIVATE}), 2, [tiny.SIZES["clinic"]])
    assert whole is not None
    loop.at["clinic"].policy = Policy(dp="local", epsilon=whole * 0.99)
    notes = tiny.Notes()
    over_network(tmp_path / "a", "gn", loop=loop, observer=notes, **PRIVATE)
    assert any("as the epsilon of a run" in note for note in notes.notes)
    loop.at["clinic"].policy = Policy(dp="local", epsilon=whole * 1.01)
    quiet = tiny.Notes()
    over_network(tmp_path / "b", "gn", loop=loop, observer=quiet, **PRIVATE)
    assert not any("its policy has" in note for note in quiet.notes)


@needs_opacus
@pytest.mark.parametrize("method", ["fedavg", "hbn", "fedprox+gn"])
def test_a_site_does_not_believe_that_a_method_is_private(tmp_path: Path, method: str) -> None:
    """The server's own check may have been taken out."""
    site = sites_of(tiny.federation(), tmp_path, tiny.model())["ward"]
    config = Config(**{**tiny.OPTIONS, "data": "folder", "method": method, "dp": "local"})
    import fedkeel

    session = {
        "run": "0" * 16,
        "version": fedkeel.__version__,
        "config": config.to_dict(),
        "classes": list(tiny.CLASSES),
    }
    request = {"do": "train", "session": session, "step": 0, "after": -1}
    assert "'dp=local'" in site.reply(request, b"")[0]["failure"]


OWN_TRAINING = {
    "loss": "cross-entropy(label_smoothing=0.1, class_weights='1,2.5,1,1')",
    "optimizer": "adam(betas=(0.8, 0.9))",
    "schedule": "warmup(rounds=1, then=step)",
}


def test_a_site_trains_on_the_loss_the_optimiser_and_the_schedule_that_the_server_names(tmp_path: Path) -> None:
    run = over_network(tmp_path, **OWN_TRAINING)
    alone = in_one_process(tmp_path / "alone", **OWN_TRAINING)
    model = "model.safetensors"
    assert (run.directory / model).read_bytes() == (alone.directory / model).read_bytes()
    plain = over_network(tmp_path / "plain")
    assert (run.directory / model).read_bytes() != (plain.directory / model).read_bytes()
