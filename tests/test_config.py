from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel import config as configuration
from fedkeel.config import Config
from fedkeel.errors import FedkeelError


def reread(config: Config, folder: Path) -> Config:
    path = folder / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    return configuration.from_dict(configuration.read(path))


def test_the_file_read_again_is_the_configuration(tmp_path: Path) -> None:
    config = Config(method="fedprox(mu=0.1)+gn", learning_rate=1e-5, weight_decay=1e16, stateless=True, seed=2**40)
    assert reread(config, tmp_path) == config


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@settings(max_examples=100, deadline=None)
@given(text, st.floats(1e-300, 1e300), st.integers(0, 2**62), st.booleans())
def test_any_text_and_number_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, rate: float, seed: int, flag: bool
) -> None:
    config = Config(data=name, learning_rate=rate, seed=seed, stateless=flag)
    assert reread(config, tmp_path_factory.getbasetemp()) == config


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rounds": 0}, "'rounds' is 0"),
        ({"rounds": -3}, "'rounds' is -3"),
        ({"batch_size": 0}, "'batch_size' is 0"),
        ({"learning_rate": 0.0}, "'learning_rate' is 0.0"),
        ({"learning_rate": -0.1}, "'learning_rate' is -0.1"),
        ({"learning_rate": math.nan}, "finite"),
        ({"learning_rate": math.inf}, "finite"),
        ({"participation": 0}, "'participation' is 0"),
        ({"participation": 1.5}, "at most 1"),
        ({"rounds": 2.5}, "not a whole number"),
        ({"rounds": True}, "not a whole number"),
        ({"learning_rate": "fast"}, "not a number"),
        ({"stateless": 1}, "not true or false"),
        ({"weighting": "sample"}, "did you mean 'samples'?"),
        ({"data": "folder(root=\udcff)"}, "not valid Unicode"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(options: dict[str, Any], named: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        Config(**options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(FedkeelError, match=r"no option 'batchsize': did you mean 'batch_size'\?"):
        configuration.from_dict({"batchsize": 3})
    with pytest.raises(FedkeelError, match="did you mean 'rounds'"):
        Config().replace(round=3)


def test_dashes_in_a_file_are_underscores(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("batch-size = 7\n")
    assert configuration.read(tmp_path / "c.toml") == {"batch_size": 7}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"rounds = = 3", "not valid TOML"),
        (b"data = '\xff'", "not valid TOML"),
        (b"rounds = 1" + b"0" * 5000, "not valid TOML"),
        (b"data = " + b"[" * 5000, "not valid TOML"),
        (b"momentum = 1" + b"0" * 400, "'momentum' is inf: give a finite number"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(FedkeelError, match=reason):
        configuration.from_dict(configuration.read(tmp_path / "c.toml"))
    with pytest.raises(FedkeelError, match="cannot be read: No such file"):
        configuration.read(tmp_path / "none.toml")


def test_whole_numbers_are_numbers() -> None:
    assert Config(learning_rate=1).learning_rate == 1.0
    assert isinstance(Config(learning_rate=1).learning_rate, float)


def test_every_option_is_explained_and_has_a_heading() -> None:
    for entry in dataclasses.fields(Config):
        assert entry.metadata["help"]
    assert dataclasses.fields(Config)[0].metadata["heading"]  # and the others have that of the last before them
