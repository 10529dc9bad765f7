"""What a search tries is typed in a line; whatever cannot be tried is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeel.config import Config, option_names
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import read_method, read_methods
from fedkeel.experiments.tune_space import (
    TUNABLE,
    Choices,
    Span,
    configured,
    default_params,
    read_space,
    row_label,
    spaces_of,
    usual_space,
)

METHODS = ("fedavg", "fedprox+greg", "greg@batch_size=8")


def space_of(text: Any, *methods: str) -> dict[str, dict[str, str]]:
    found = spaces_of(read_space(text), read_methods(methods or METHODS, {}))
    return {label: {name: str(dimension) for name, dimension in space.items()} for label, space in found.items()}


def test_an_option_of_a_method_is_for_the_rows_that_have_it() -> None:
    text = "learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1, 3]"
    plain, both = (
        {"learning_rate": "log(0.001, 0.3)"},
        {"learning_rate": "log(0.001, 0.3)", "greg.alpha": "[0.3, 1, 3]"},
    )
    assert space_of(text) == {"fedavg": plain, "fedprox+greg": both, "greg@batch_size=8": both}


def test_text_several_texts_and_a_table_say_the_same() -> None:
    wanted = {"learning_rate": Span("log", 0.001, 0.3), "greg.alpha": Choices((0.3, 1, 3))}
    assert read_space("learning-rate = log(0.001,0.3),greg.alpha=[0.3,1,3]") == wanted
    assert read_space(["learning_rate=log(1e-3, 0.3)", "greg.alpha=[0.3, 1, 3]"]) == wanted
    assert read_space({"learning_rate": "log(0.001, 0.3)", "greg.alpha": [0.3, 1, 3]}) == wanted
    assert read_space(None) == {}


def test_words_truths_and_names_with_options_are_choices() -> None:
    text = "optimizer=[sgd, 'adam(betas=(0.9, 0.99))'], drop_last=[true, false], greg.warm_start=[auto, false]"
    assert {name: d.extremes for name, d in read_space(text).items()} == {
        "optimizer": ("sgd", "adam(betas=(0.9, 0.99))"),
        "drop_last": (True, False),
        "greg.warm_start": ("auto", False),
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("learning_rate", "'learning_rate' in the space is no range of an option: write it like"),
        ("", "is no range of an option"),
        ("learning_rate=0.1", "gives 'learning_rate' '0.1': write it like"),
        ("lr=log(1, 2)", "There is no option 'lr': did you mean 'learning_rate'?"),
        ("learning_rate=logg(1, 2)", "did you mean 'log'?"),
        ("learning_rate=log(0.1)", "give two numbers, like log(1, 10)"),
        ("learning_rate=log(a, b)", "give two numbers"),
        ("learning_rate=uniform(true, 2)", "give two numbers"),
        ("local_epochs=int(1, 2.5)", "give two whole numbers, like int(1, 10)"),
        ("learning_rate=log(0, 1)", "'log' needs a lower end above 0"),
        ("learning_rate=log(-1, 1)", "'log' needs a lower end above 0"),
        ("learning_rate=log(1, 0.1)", "is empty: give a lower and an upper end"),
        ("momentum=uniform(0.5, 0.5)", "is empty"),
        ("momentum=uniform(0, 1e999)", "is empty"),
        ("momentum=uniform(0, 2)", "'momentum' is 2.0: give a number from 0 to 1."),
        ("batch_size=log(8, 64)", "'batch_size' is 8.0, which is not a whole number"),
        ("batch_size=[]", "The list of 'batch_size' in the space is empty"),
        ("batch_size=[8, 8]", "has 8 twice"),
        ("batch_size=[8, [9]]", "has [9]: give numbers or words"),
        ("batch_size=[8, many]", "'batch_size' is 'many'"),
        ("batch_size=[8], batch-size=[9]", "The space has 'batch_size' twice"),
        ("weighting=[samples, equal]", "'weighting' is 'equal'"),
        ("greg.alhpa=[1]", "'greg' has no option 'alhpa': did you mean 'alpha'?"),
        ("greg.alpha=uniform(-1, 1)", "The 'alpha' of greg is -1.0: give at least 0."),
        ("greg.mode=[consistency, other]", "The 'mode' of greg is 'other'"),
        ("hbn.momentum=[0.1]", "'hbn' is in none of the methods 'fedavg', 'fedprox+greg', 'greg@batch_size=8'"),
        ("grge.alpha=[1]", "There is no method named 'grge': did you mean 'greg'?"),
    ],
)
def test_what_cannot_be_tried_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError) as refused:
        space_of(text, "fedavg", "fedprox+greg", "greg@batch_size=8" if "batch" not in text else "greg")
    assert sentence.replace(", 'greg@batch_size=8'", "") in str(refused.value).replace(", 'greg@batch_size=8'", "")
    assert str(refused.value).endswith((".", "?"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("given", [3, 0.1, [1, 2], {"learning_rate": 0.1}, {"learning_rate": None}, {"a": {}}])
def test_what_is_no_space_at_all_is_refused(given: Any) -> None:
    with pytest.raises(FedkeelError, match="write it like"):
        read_space(given)


@pytest.mark.parametrize("name", sorted({*option_names()} - {*TUNABLE}))
def test_what_is_measured_and_where_is_not_tuned(name: str) -> None:
    with pytest.raises(FedkeelError, match=f"'{name}' is in the space, but it decides what is measured"):
        space_of({name: [1, 2]})


def test_a_row_that_sets_an_option_itself_is_not_given_another() -> None:
    with pytest.raises(FedkeelError, match=r"'greg@batch_size=8' sets 'batch_size', which is tuned"):
        space_of("batch_size=[8, 16]")
    with pytest.raises(FedkeelError, match=r"'fedprox\(mu=0.1\)' sets 'mu', which is tuned"):
        space_of("fedprox.mu=log(0.01, 1)", "fedprox(mu=0.1)")


def test_the_usual_space_is_the_learning_rate_around_the_one_given() -> None:
    assert usual_space(0.07) == {"learning_rate": Span("log", 0.007, 0.7)}


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
    space = read_space("learning_rate=log(0.001, 0.3), greg.alpha=[0.3, 1], batch_size=[64, 128]")
    found = default_params(Config(method="greg"), space)
    assert found == {"learning_rate": 0.01, "greg.alpha": 1}
    assert isinstance(found["greg.alpha"], int)  # as it stands in the list


def test_what_is_tried_has_few_digits_and_stays_in_its_range() -> None:
    assert Span("log", 0.001, 0.3).tried(0.0123456789) == 0.01235
    assert Span("uniform", 0.12342, 0.2).tried(0.12342) == 0.12342
    assert Span("int", 1, 9).tried(7) == 7


@pytest.mark.parametrize(
    ("dimension", "value", "end"),
    [
        (Span("log", 0.001, 1.0), 0.0013, "lower"),
        (Span("log", 0.001, 1.0), 0.03, ""),
        (Span("log", 0.001, 1.0), 0.9, "upper"),
        (Span("uniform", 0.0, 1.0), 0.97, "upper"),
        (Span("int", 1, 5), 1, "lower"),
        (Span("int", 1, 5), 4, ""),
        (Choices((0.1, 0.3, 1)), 0.1, "lower"),
        (Choices((0.1, 0.3, 1)), 0.3, ""),
        (Choices((0.1, 0.3)), 0.1, ""),  # of two, each is an end
        (Choices(("sgd", "adam", "adamw")), "sgd", ""),
    ],
)
def test_a_value_at_the_end_of_its_range_is_known_as_such(dimension: Any, value: Any, end: str) -> None:
    assert dimension.edge(value) == end
