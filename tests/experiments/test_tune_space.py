"""What a search tries is typed in a line; whatever cannot be tried is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import read_method, read_methods
from fedkeel.experiments.tune_space import (
    configured,
    default_params,
    distribution,
    read_space,
    row_label,
    shown,
    spaces_of,
)

METHODS = ("fedavg", "fedprox+greg", "greg@batch_size=8")


def space_of(text: Any, *methods: str) -> dict[str, dict[str, str]]:
    found = spaces_of(read_space(text, 0.01), read_methods(methods or METHODS, {}))
    return {label: {name: shown(one) for name, one in space.items()} for label, space in found.items()}


def test_an_option_of_a_method_is_for_the_rows_that_have_it() -> None:
    text = "learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1, 3]"
    plain, both = (
        {"learning_rate": "log(0.001, 0.3)"},
        {"learning_rate": "log(0.001, 0.3)", "greg.alpha": "[0.3, 1, 3]"},
    )
    assert space_of(text) == {"fedavg": plain, "fedprox+greg": both, "greg@batch_size=8": both}


def test_text_several_texts_and_a_table_say_the_same() -> None:
    wanted = {
        "learning_rate": FloatDistribution(0.001, 0.3, log=True),
        "greg.alpha": CategoricalDistribution((0.3, 1, 3)),
    }
    assert read_space("learning-rate = log(0.001,0.3),greg.alpha=[0.3,1,3]", 1) == wanted
    assert read_space(["learning_rate=log(1e-3, 0.3)", "greg.alpha=[0.3, 1, 3]"], 1) == wanted
    assert read_space({"learning_rate": "log(0.001, 0.3)", "greg.alpha": [0.3, 1, 3]}, 1) == wanted
    assert read_space(None, 0.07) == {"learning_rate": FloatDistribution(0.007, 0.7, log=True)}


def test_words_truths_and_names_with_options_are_choices() -> None:
    found = distribution("[sgd, 'adam(betas=(0.9, 0.99))', true]")
    assert found == CategoricalDistribution(("sgd", "adam(betas=(0.9, 0.99))", True))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *(
            (text, "write it like learning_rate=log(0.001, 0.3)")
            for text in (
                *("learning_rate", "", "learning_rate=0.1", "learning_rate=logg(1, 2)", "learning_rate=log(0.1)"),
                *("learning_rate=log(a, b)", "local_epochs=int(1, 2.5)", "learning_rate=log(0, 1)"),
                *("learning_rate=log(1, 0.1)", "momentum=uniform(0, 1e999)", "batch_size=[8, [9]]"),
                *(3, [1, 2], {"learning_rate": 0.1}, {"a": {}}),
            )
        ),
        ("lr=log(1, 2)", "There is no option 'lr': did you mean 'learning_rate'?"),
        ("momentum=uniform(0, 2)", "'momentum' is 2.0: give a number from 0 to 1."),
        ("batch_size=log(8, 64)", "'batch_size' is 8.0, which is not a whole number"),
        ("weighting=[samples, equal]", "'weighting' is 'equal'"),
        ("batch_size=[8], batch-size=[9]", "The space has 'batch_size' twice"),
        ("greg.alhpa=[1]", "'greg' has no such option: did you mean 'alpha'?"),
        ("greg.alpha=uniform(-1, 1)", "The 'alpha' of greg is -1.0: give at least 0."),
        ("hbn.momentum=[0.1]", "'hbn' is in none of the methods"),
        ("grge.alpha=[1]", "There is no method named 'grge': did you mean 'greg'?"),
        ("rounds=[1, 2]", "'rounds' is in the space, but it decides what is measured"),
        ("data=[digits]", "'data' is in the space, but it decides what is measured"),
    ],
)
def test_what_cannot_be_tried_is_refused(text: Any, sentence: str) -> None:
    with pytest.raises(FedkeelError) as refused:
        space_of(text, "fedavg", "fedprox+greg")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_row_that_sets_an_option_itself_is_not_given_another() -> None:
    with pytest.raises(FedkeelError, match=r"'greg@batch_size=8' sets 'batch_size', which is tuned"):
        space_of("batch_size=[8, 16]")
    with pytest.raises(FedkeelError, match=r"'fedprox\(mu=0.1\)' sets 'mu', which is tuned"):
        space_of("fedprox.mu=log(0.01, 1)", "fedprox(mu=0.1)")


def test_values_go_where_they_belong_and_the_row_can_be_typed() -> None:
    label, params = "fedprox+greg(momentum=0.2)@rounds=3", {"greg.alpha": 0.3, "learning_rate": 0.0123}
    config = read_method(label, {})
    tuned = configured(config, params)
    assert (tuned.method, tuned.learning_rate) == ("fedprox+greg(momentum=0.2, alpha=0.3)", 0.0123)
    typed = row_label(label, config, params)
    assert typed == "fedprox+greg(momentum=0.2, alpha=0.3)@rounds=3,learning_rate=0.0123"
    assert read_method(typed, {}) == tuned
    assert row_label("fedavg", Config(), {}) == "fedavg"


def test_the_default_settings_are_taken_as_far_as_the_space_has_them() -> None:
    space = read_space("learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1], batch_size=[64, 128]", 1)
    assert default_params(Config(method="greg"), space) == {"learning_rate": 0.01, "greg.alpha": 1}
