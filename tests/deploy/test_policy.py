"""A site's policy: what it says, how it is read, and that both ends are told what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.deploy import request_checks
from fedkeel.deploy.memory import PrivacyLedger
from fedkeel.deploy.policy import Policy, Refused, options
from fedkeel.engine.losses import LOSSES
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.registry import Entry
from tests import tiny
from tests.deploy.loop import Loop, over_network, sites_of
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
    assert all(f"\n{entry.name} = " in text for entry in options())


def test_the_page_on_deployment_shows_every_line_of_a_policy(tmp_path: Path) -> None:
    (block,) = [part.partition("```")[0] for part in DOCS.read_text().split("```toml\n") if "# policy.toml" in part]
    policy = Policy.read(written(tmp_path, block))
    assert list(policy.numbers) == [entry.name for entry in options()]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("round = 3", "There is no 'round' in a policy: did you mean 'rounds'?"),
        ("max-parameters = 3", "There is no 'max_parameters' in a policy: did you mean 'parameters'?"),
        ("source = 'x'", "There is no 'source' in a policy"),
        ("rounds = 0", "'rounds' is 0: give at least 1."),
        ("rounds = 'many'", "'rounds' is 'many', which is not a whole number: give at least 1."),
        ("questions = 1", "'questions' is 1, which is not true or false."),
        ("dp = 'locl'", "'dp' is 'locl': did you mean 'local'?"),
        ("methods = ['fedavgg']", "'methods' in the policy has 'fedavgg', which is none: did you mean 'fedavg'?"),
        ("models = ['simple_cn']", "'models' in the policy has 'simple_cn', which is none: did you mean 'simple_cnn'?"),
        ("methods = 3", "'methods' in the policy is 3: give a list of names"),
        ("methods = [3]", "'methods' in the policy is [3]: give a list of names"),
        ("epsilon = 3.0", "'epsilon' does nothing without 'dp = \"local\"'"),
        ("delta = 1e-3", "'delta' does nothing without a limit on 'epsilon'"),
        ("epsilon = -3.0", "'epsilon' is -3.0: give at least 0."),
        ("rounds", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_policy_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError) as wrong:
        Policy.read(written(tmp_path, text))
    assert sentence in str(wrong.value)
    with pytest.raises(FedkeelError, match=r"The policy '.*nowhere.toml' cannot be read"):
        Policy.read(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("lines", "config", "asked_for"),
    [
        ("methods = ['fedavg', 'fed*m']", {"method": "fedavg+gn"}, "the method 'gn'"),
        ("methods = ['fedavg', 'fed*m']", {"method": "scaffold"}, "the method 'scaffold'"),
        ("models = ['simple_cnn']", {"model": "resnet18"}, "the model 'resnet18'"),
        ("models = ['resnet*']", {"model": "timm:resnet18"}, "the model 'timm:resnet18'"),
        ("models = ['resnet*']", {"model": "resnet26d"}, "the model 'timm:resnet26d'"),
        ("image_size = 64", {"data": "folder(size=65)"}, "65 pixels as the 'size' of 'folder'"),
        ("image_size = 64", {"data": "folder(size=8, test_transform='resize(size=65)')"}, "65 pixels as the 'size'"),
        ("rounds = 5", {"rounds": 6}, "6 rounds"),
        ("dp = 'central'", {}, "'dp = \"none\"'"),
        ("dp = 'local'", {"dp": "central"}, "'dp = \"central\"'"),
    ],
)
def test_each_line_refuses_what_is_beyond_it_and_is_named(
    tmp_path: Path, lines: str, config: dict[str, Any], asked_for: str
) -> None:
    policy = Policy.read(written(tmp_path, f"# ours\n\n{lines}\n"))
    with pytest.raises(Refused) as refused:
        request_checks.check(Config(**config), policy)
    name = lines.partition(" ")[0]
    assert str(refused.value).startswith(asked_for)
    assert str(refused.value).endswith(f", and its policy has '{policy.text(name)}'")
    assert refused.value.line == f"policy.toml, line 3: {policy.text(name)}"


def test_what_is_within_a_policy_passes(tmp_path: Path) -> None:
    lines = "methods = ['fedavg', 'gn']\nmodels = 'simple_*'\nrounds = 5\ndp = 'central'\nimage_size = 32"
    config = Config(method="fedavg+gn", rounds=5, dp="local", evaluation_batch=32, data="folder(size=32)")
    request_checks.check(config, Policy.read(written(tmp_path, lines)))


def test_a_site_that_refuses_sits_out_and_both_ends_say_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    policy = Policy.read(written(tmp_path, "# ours\nrounds = 2\n"))
    loop.at["clinic"].policy = policy
    notes = tiny.Notes()
    run = over_network(tmp_path, loop=loop, observer=notes, rounds=3)
    assert run.finished
    assert "The site 'clinic' sits out: it refuses 3 rounds, and its policy has 'rounds = 2'." in notes.notes
    assert (
        "The site refuses 3 rounds, and its policy has 'rounds = 2' (policy.toml, line 2: rounds = 2)." in caplog.text
    )
    assert set(run.summary["domains"]) == {"bright", "tinted"}  # type: ignore[index]


def test_where_too_few_are_left_the_server_ends_and_says_why(tmp_path: Path) -> None:
    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    for site in loop.at.values():
        site.policy = Policy(rounds=2)
    with pytest.raises(FedkeelError, match=r"No site can take part .*it refuses 3 rounds"):
        over_network(tmp_path / "all", loop=loop, rounds=3)
    loop.at["ward"].policy = Policy()
    with pytest.raises(FedkeelError, match="'min_clients' is 2, but a round trains 1"):
        over_network(tmp_path / "two", loop=loop, rounds=3, min_clients=2)


@pytest.mark.parametrize(("line", "method"), [("questions", "hbn"), ("evaluation", "fedavg")])
def test_questions_and_evaluations_can_be_refused(tmp_path: Path, line: str, method: str) -> None:
    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    loop.at["clinic"].policy = replace(Policy(), **{line: False})
    notes = tiny.Notes()
    over_network(tmp_path, method, loop=loop, observer=notes, rounds=1)
    assert any("'clinic'" in note and f"its policy has '{line} = false'" in note for note in notes.notes), notes.notes


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
    assert any("as the epsilon of a run, and its policy has 'epsilon = " in note for note in notes.notes)
    loop.at["clinic"].policy = Policy(dp="local", epsilon=whole * 1.01)
    quiet = tiny.Notes()
    over_network(tmp_path / "b", "gn", loop=loop, observer=quiet, **PRIVATE)
    assert not any("refuses" in note for note in quiet.notes)


@needs_opacus
def test_what_all_runs_together_spend_is_counted_at_the_site(tmp_path: Path) -> None:
    """A server that starts anew, or trains the same round on another model, does not get more out of a site."""
    from fedkeel.trust import privacy

    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    whole = privacy.spent(Config(**{**tiny.OPTIONS, **PRIVATE}), 2, [tiny.SIZES["clinic"]])
    assert whole is not None
    loop.at["clinic"].policy = Policy(dp="local", epsilon=whole * 1.01)
    first, second = tiny.Notes(), tiny.Notes()
    over_network(tmp_path / "a", "gn", loop=loop, observer=first, **PRIVATE)
    over_network(tmp_path / "b", "gn", loop=loop, observer=second, **PRIVATE, seed=1)
    assert not any("refuses" in note for note in first.notes)
    refused = [note for note in second.notes if "as the epsilon of all that was trained here" in note]
    assert len(refused) == 2


@needs_opacus
def test_every_training_is_charged_and_a_damaged_account_is_told(tmp_path: Path) -> None:
    from fedkeel.trust.privacy import epsilon

    account, config = PrivacyLedger(tmp_path), Config(**{**tiny.OPTIONS, **PRIVATE})
    policy = Policy(dp="local", epsilon=epsilon(1.5, 0.4, 2 * 3, 1e-5) * 1.01)
    for _ in range(2):
        account.charge(config, 10, policy)
    with pytest.raises(Refused, match="as the epsilon of all that was trained here"):
        account.charge(config, 10, policy)
    spent = (tmp_path / "privacy.json").read_text()
    for damaged in ("{", "{}", "[]", spent.replace("6", "-6"), spent.replace("1.5", "9.5")):
        (tmp_path / "privacy.json").write_text(damaged)
        with pytest.raises(FedkeelError, match="cannot be read: put it back"):
            account.charge(config, 10, policy)


@needs_opacus
@pytest.mark.parametrize("method", ["fedavg", "hbn", "fedprox+gn"])
def test_a_site_does_not_believe_that_a_method_is_private(tmp_path: Path, method: str) -> None:
    """The server's own check may have been taken out."""
    site = sites_of(tiny.federation(), tmp_path, tiny.model())["ward"]
    config = Config(**{**tiny.OPTIONS, "method": method, "dp": "local"})
    import fedkeel

    session = {"run": "r", "version": fedkeel.__version__, "config": config.to_dict(), "classes": list(tiny.CLASSES)}
    request = {"do": "train", "session": session, "start": 1, "step": [0, 0], "after": None}
    assert "'dp=local'" in site.reply(request, b"")[0]["failure"]


OWN_TRAINING = {
    "loss": "cross-entropy(label_smoothing=0.1, class_weights='1,2.5,1,1')",
    "optimizer": "adam(betas=(0.8, 0.9))",
    "schedule": "warmup(rounds=1, then=step)",
}


def test_a_site_trains_on_the_loss_the_optimiser_and_the_schedule_that_the_server_names(tmp_path: Path) -> None:
    run = over_network(tmp_path, **OWN_TRAINING)
    alone = tiny.run(tmp_path / "alone", **OWN_TRAINING)
    model = "model.safetensors"
    assert (run.directory / model).read_bytes() == (alone.directory / model).read_bytes()
    plain = over_network(tmp_path / "plain")
    assert (run.directory / model).read_bytes() != (plain.directory / model).read_bytes()


def test_patience_is_the_server_s(tmp_path: Path) -> None:
    run = over_network(tmp_path, rounds=9, patience=2, min_delta=1.0)
    assert (run.finished, run.rounds_done) == (True, 3)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"loss": "theirs"}, "There is no loss named 'theirs'"),
        ({"loss": "cross-entropy(class_weights='../secret')"}, "give a word of at most 40 letters"),
        ({"loss": "cross-entropy(label_smoothing=1e99)"}, "a number of at most"),
        ({"optimizer": "theirs"}, "There is no optimizer named 'theirs'"),
        ({"optimizer": "adam(betas=(2, 3))"}, "cannot take a step"),
        ({"schedule": "theirs"}, "There is no schedule named 'theirs'"),
        ({"schedule": "warmup(then='step(every=2)')"}, "give a word of at most 40 letters"),
    ],
)
def test_what_a_site_has_not_is_refused_in_a_sentence(config: dict[str, Any], sentence: str) -> None:
    request_checks.check(Config(**OWN_TRAINING), Policy())
    with pytest.raises(FedkeelError) as refused:
        request_checks.check(Config(**config), Policy())
    assert sentence in str(refused.value)


def test_sites_that_lack_a_loss_sit_out_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> Any:
        return lambda logits, labels: logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]

    monkeypatch.setattr(LOSSES, "_entries", {**LOSSES._entries, "theirs": Entry("theirs", theirs, "", "")})
    known = request_checks.check_training

    def lacking(config: Config) -> None:
        with monkeypatch.context() as there:
            there.delitem(LOSSES._entries, "theirs")
            known(config)

    monkeypatch.setattr(request_checks, "check_training", lacking)
    with pytest.raises(TrainingError, match=r"it refuses what it is asked for: There is no loss named 'theirs'"):
        over_network(tmp_path, loss="theirs")
