"""What is to be compared: methods with options of their own, and seeds."""

from __future__ import annotations

import pytest

from fedkeel.core.naming import slug
from fedkeel.errors import FedkeelError
from fedkeel.experiments.rows import read_method, read_seeds


class TestEntries:
    def test_options_after_the_at_sign_belong_to_that_method_alone(self) -> None:
        config = read_method(
            "fedprox(mu=0.1)+gn@learning-rate=0.5,stateless=true", {"learning_rate": 0.01, "rounds": 7}
        )
        assert (config.method, config.learning_rate, config.stateless) == ("fedprox(mu=0.1)+gn", 0.5, True)
        assert config.rounds == 7

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("fedavg@learning_rat=1", "learning_rate"),
            ("fedavg@rounds=ten", "'ten'"),
            ("fedavg@seed=1", "seed"),
            ("fedavg@rounds", "fedavg@learning_rate=0.1"),
            ("fedavg@rounds=0", "at least 1"),
        ],
    )
    def test_a_bad_option_is_refused_and_named(self, text: str, named: str) -> None:
        with pytest.raises(FedkeelError, match=named):
            read_method(text, {})

    def test_seeds(self) -> None:
        assert read_seeds(3) == read_seeds("3") == [0, 1, 2]
        assert read_seeds("4,1") == [4, 1]
        for wrong in ("0", "a", "1,1", ""):
            with pytest.raises(FedkeelError):
                read_seeds(wrong)

    def test_different_methods_have_different_folders(self) -> None:
        texts = [
            "fedprox",
            "fedprox(mu=0.1)",
            "fedprox(mu=1)",
            "fedprox+gn",
            "fedprox@learning_rate=0.1",
            "gn(groups=2)",
        ]
        assert len({slug(text) for text in texts}) == len(texts)
        assert all("/" not in slug(text) for text in [*texts, "fedavg@data=folder(root=/a/b)"])
