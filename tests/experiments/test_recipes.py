"""The recipes: all are there, every cell is a configuration, and the published numbers agree with each other."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from fedkeel import methods, spec
from fedkeel.core.composition import Composition
from fedkeel.data import DATASETS
from fedkeel.data import partition as partitions
from fedkeel.data.load import Cut
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import PublishedNumber, Recipe, RecipeColumn, RecipeRow, names, parse
from fedkeel.experiments.recipes import load as read_recipe
from fedkeel.models import MODELS
from fedkeel.registry import Registry
from fedkeel.runs.store import fingerprint

WANTED = {
    "greg": [*(f"table{n}" for n in (1, 2, 3, 4, 5, 7, 8, 9, 10)), *(f"figure{n}" for n in (1, 2, 3, 4, 5, 6, 7, 9))],
    "hbn": [*(f"table{n}" for n in (1, 2, 3, 4, 5, 6, 8)), *(f"figure{n}" for n in (1, 3, 4, 5, 6, 7)), "section5"],
    "fedwon": [*(f"table{n}" for n in (1, 2, 3, 4, 5, 11, 12)), *(f"figure{n}" for n in ("1b", 3, 4, 8, 9))],
    "fedcoda": [*(f"table{n}" for n in range(1, 12)), *(f"figure{n}" for n in range(3, 9))],
    "univarfl": ["table1", "table2", "figure1", "section1"],
}
EVERY = names()
OWN = {name for name in EVERY if name.startswith("fedkeel/")}  # of no paper
load = cache(read_recipe)

SMALL = """
paper = "HBN"
table = "Table 0"
caption = "A table"
measure = "Accuracy in %"
protocol = "Section 0"
seeds = [0]
columns = [
    { group = "digits", label = "A", learning_rate = 0.1 },
    { group = "digits", label = "B", batch_size = 8 },
    { group = "digits", label = "Avg.", average = true },
]
rows = [
    { label = "one", method = "fedavg" },
    { label = "two", method = "gn", batch_size = 4, on = { digits = { rounds = 5 }, "digits B" = { rounds = 6 } } },
]
[base]
rounds = 3
batch_size = 2
[groups.digits]
rounds = 4
[published]
one = "10.0 20.0±1.5 15.0"
two = "-    ?        ?"
"""


def cells_of(recipe: Recipe) -> list[tuple[str, str]]:
    return [(row.label, column.name) for row, column in recipe.cells()]


@pytest.fixture(params=EVERY)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return load(request.param)


class TestEveryRecipe:
    def test_there_is_one_for_every_table_and_figure(self) -> None:
        wanted = {f"{paper}/{table}" for paper, tables in WANTED.items() for table in tables}
        assert wanted - set(EVERY) == set()

    def test_what_is_there_besides_is_a_substitute_and_says_so(self) -> None:
        wanted = {f"{paper}/{table}" for paper, tables in WANTED.items() for table in tables}
        assert {name for name in EVERY if load(name).substitute} == set(EVERY) - wanted - OWN

    def test_tables_come_before_figures_in_the_order_of_their_numbers(self) -> None:
        hbn = [name for name in EVERY if name.startswith("hbn/") and "-" not in name]
        assert hbn == [f"hbn/{name}" for name in WANTED["hbn"]]

    def test_the_header_says_where_it_is_from(self, recipe: Recipe) -> None:
        assert recipe.name.startswith(recipe.paper.lower() + "/")
        assert all((recipe.caption, recipe.measure, recipe.protocol, recipe.seeds, recipe.decisions))
        if recipe.name in OWN:
            return
        number = recipe.table.partition(",")[0].lower().replace(" ", "")
        assert recipe.name.partition("/")[2].partition("-")[0] == number

    def test_every_cell_is_a_configuration_that_can_be_built(self, recipe: Recipe) -> None:
        configs = {recipe.config(row, column) for row, column in recipe.cells()}
        assert configs
        for method in {config.method for config in configs}:
            if all(part.name in methods.METHODS for part in spec.parse_sum(method)):
                Composition.of(methods.build(method))
        for model in {config.model for config in configs}:
            parsed = spec.parse(model)
            if not parsed.name.startswith("timm:"):
                MODELS.entry(parsed.name).check_options("model", parsed.options)
        for partition in {config.partition for config in configs}:
            partitions.build(partition)

    def test_the_data_sets_options_are_known_where_the_data_set_is(self, recipe: Recipe) -> None:
        for data in {recipe.config(row, column).data for row, column in recipe.cells()}:
            parsed = spec.parse(data)
            if parsed.name in DATASETS:
                refuse_unknown_options(DATASETS, parsed)

    def test_which_lists_lie_beside_pacs_does_not_matter(self, recipe: Recipe) -> None:
        for data in {recipe.config(row, column).data for row, column in recipe.cells()}:
            parsed = spec.parse(data)
            if parsed.name == "pacs":
                assert "subset" in parsed.options or parsed.options.get("crossval") == "unused"

    def test_the_domains_of_digits_are_named_since_others_may_lie_beside_them(self, recipe: Recipe) -> None:
        for row, column in recipe.cells():
            config = recipe.config(row, column)
            parsed = spec.parse(config.data)
            if parsed.name == "digits-five" and not recipe.substitute and recipe.name not in OWN:
                assert parsed.options["domains"] == "[mnist, mnistm, svhn, synth, usps]"

    def test_an_unseen_domain_has_no_clients(self, recipe: Recipe) -> None:
        for row, column in recipe.cells():
            config = recipe.config(row, column)
            counted = spec.parse(config.partition)
            if config.unseen and counted.name == "clients":
                assert config.unseen not in counted.options
            reading = recipe.reading(row, column)
            if recipe.name in OWN:  # reads an unseen domain by its name
                assert config.unseen == reading.get("domain", "")
            else:
                assert bool(config.unseen) == (reading.get("read") in UNSEEN_READINGS)


@pytest.mark.parametrize("name", ["table1", "table1-cifar10", "table2", "table2-cifar10", "figure1"])
def test_univarfl_splits_what_it_does_not_test_on_90_to_10(name: str) -> None:
    recipe = load(f"univarfl/{name}")
    for row, column in recipe.cells():
        options = spec.parse(recipe.config(row, column).data).options
        assert options["validation"] == pytest.approx(0.1 * (1 - options.get("test", 0)))


UNSEEN_READINGS = ("unseen", "nmi", "prototype-similarity")  # FedCoda's are all of the unseen domain


def own_of(paper: str) -> list[Recipe]:
    """The recipes of a paper with its own data and networks."""
    return [recipe for recipe in map(load, EVERY) if recipe.name.startswith(f"{paper}/") and not recipe.substitute]


def refuse_unknown_options(registry: Registry[object], parsed: spec.Spec) -> None:
    loading = {field.name for field in fields(Cut)}
    for transform in ("train_transform", "test_transform"):
        if transform in parsed.options:
            parse_transforms(parsed.options[transform])
    own = {option: value for option, value in parsed.options.items() if option not in loading}
    registry.entry(parsed.name).check_options("data set", own)


def test_those_for_two_cores_have_seeds_that_nothing_was_chosen_with() -> None:
    small = [load(name) for name in EVERY if name.endswith("-small")]
    assert {recipe.name.partition("/")[0] for recipe in small} == set(WANTED)
    for recipe in small:
        assert (recipe.seeds, bool(recipe.reference)) == ((20, 21, 22, 23, 24), True)
        assert any(text.startswith("Kept") for text in recipe.decisions)
        assert {recipe.config(*cell).result for cell in recipe.cells()} == {"mean-last-10"}


class TestPublishedNumbers:
    def test_printed_averages_are_the_means_of_their_cells_or_called_misprints(self, recipe: Recipe) -> None:
        for column in (column for column in recipe.columns if column.average):
            for row in recipe.rows:
                printed = recipe.published.get((row.label, column.name))
                cells = [recipe.published.get((row.label, part.name)) for part in recipe.parts(column)]
                if printed is None or printed.value is None or None in cells:
                    continue
                values = [cell.value for cell in cells if cell is not None and cell.value is not None]
                # Half a unit of the last digit is lost in each cell, and half a unit in the average.
                rounding = 0.5 * 10**-printed.decimals + 0.5 * max(10**-cell.decimals for cell in cells if cell)
                mean = statistics.fmean(values)
                told = [f"{row.label}'s" in text and f"{mean:.2f}" in text for text in recipe.misprints]
                assert any(told) == (abs(mean - printed.value) > rounding + 1e-9), (row.label, column.name, mean)

    def test_averages_are_checked_in_every_paper_that_prints_them(self) -> None:
        checked = {
            load(name).paper
            for name in EVERY
            for column in load(name).columns
            if column.average and any(place == column.name for _, place in load(name).published)
        }
        assert checked == {"GReg", "HBN", "FedWon", "FedCoda"}  # UniVarFL prints none

    def test_the_spread_of_hbns_averages_is_over_the_batch_sizes(self) -> None:
        recipe = load("hbn/table2")
        for column in (column for column in recipe.columns if column.average):
            for row in (row for row in recipe.rows if (row.label, column.name) in recipe.published):
                cells = [recipe.published[row.label, part.name].value for part in recipe.parts(column)]
                printed = recipe.published[row.label, column.name].spread
                assert statistics.stdev([cell for cell in cells if cell is not None]) == pytest.approx(
                    printed, abs=0.01
                )

    def test_one_experiment_has_one_number_or_the_recipe_calls_it_a_misprint(self) -> None:
        """Tables share cells: the same configuration and reading, typed twice, must have the same number."""
        found: dict[tuple[object, ...], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for recipe in (load(name) for name in EVERY):
            for row, column in recipe.cells():
                number = recipe.published.get((row.label, column.name))
                if number is None or column.relative_to or recipe.substitute:
                    continue
                reading = tuple(sorted(recipe.reading(row, column).items()))
                key = fingerprint(recipe.config(row, column)), reading
                found[key][number.text.partition("±")[0]].add(recipe.name)
        contradictions = [numbers for numbers in found.values() if len(numbers) > 1]
        assert contradictions  # the papers have some
        for numbers in contradictions:
            told = " ".join(text for name in set.union(*numbers.values()) for text in load(name).misprints)
            assert all(number in told for number in numbers), dict(numbers)

    def test_a_figure_without_printed_values_has_none_but_those_of_tables(self) -> None:
        assert not load("hbn/figure5").published
        assert not load("fedwon/figure3").published
        assert set(load("greg/figure4").published) == {("FedAvg", "PACS"), ("alpha=1", "PACS")}

    def test_a_few_numbers_as_printed(self) -> None:
        assert load("hbn/table1").published["HBN", "Tiny-ImageNet phi=0.05"].value == 24.69
        assert load("fedwon/table1").published["FedWon", "DomainNet Sketch"] == PublishedNumber("51.9±1.9", 51.9, 1.9)
        assert load("fedcoda/table9").published["GA", "PACS C"].text == "65.1±0.9"
        assert load("greg/table8").published["FBN", "Camelyon17 H2"].value == 90.1
        assert load("univarfl/table2").published["Freeze", "p=0.5"].text == "23.6±1.7"
        assert load("hbn/table8").published["FBN", "Tiny-ImageNet 0.16"].value is None  # N/A


class TestSettings:
    def test_learning_rates_follow_the_papers_tables(self) -> None:
        def rate(name: str, row: str, column: str) -> float:
            recipe = load(name)
            found = {(r.label, c.name): recipe.config(r, c) for r, c in recipe.cells()}
            return found[row, column].learning_rate

        assert rate("fedwon/table1", "FedWon", "Digits-Five SVHN") == 0.05
        assert rate("fedwon/table1", "FedWon", "Office-Caltech-10 DSLR") == 0.1
        assert rate("fedwon/table1", "FedBN", "DomainNet Real") == 0.05
        assert rate("fedwon/table1", "+LN", "Digits-Five USPS") == 0.1
        assert rate("fedwon/table2", "FedBN", "B=4 A") == 0.01
        assert rate("fedwon/table2", "FedWon", "B=1 A") == 0.005
        assert rate("hbn/table1", "FixBN", "CIFAR-10 phi=0.1") == 0.002
        assert rate("greg/table2", "FedAvg", "VLCS") == 0.005

    def test_hbn_scales_the_rate_with_the_batch_size(self) -> None:
        recipe = load("hbn/table2")
        for row, column in recipe.cells():
            config = recipe.config(row, column)
            at_four = {"BN": 0.01, "GN": 0.001, "HBN": 0.01, "HBN as described": 0.01}[row.label]
            assert config.learning_rate == pytest.approx(at_four * config.batch_size / 4)

    # A partition without HBN, and how many images HBN as described looks at.
    @pytest.mark.parametrize("name", [name for name in WANTED["hbn"] if name not in ("figure3", "section5")])
    def test_hbns_numbers_are_beside_its_released_code_and_hbn_as_described_is_there_too(self, name: str) -> None:
        recipe = load(f"hbn/{name}")
        own: dict[str, list[tuple[RecipeRow, RecipeColumn]]] = defaultdict(list)
        for row, column in recipe.cells():
            config = recipe.config(row, column)
            # What the released code does beside the method itself.
            released = (10, "exponential(decay=0.998)", True)
            assert (config.clip_norm, config.schedule, config.drop_last) == released
            for part in spec.parse_sum(config.method):
                assert part.name != "fbn" or part.options == {"variant": "released"}
                if part.name == "hbn":
                    own[str(part.options.get("variant"))].append((row, column))
                    letter = {"record": "batch", "warm_start": False}
                    if "variant" not in part.options:
                        own_way = row.label == "HBN, mixture recorded"
                        mixture = {"warm_start": False}
                        assert part.options in ([mixture] if own_way else [letter, {"momentum": 0.01, **letter}])
        assert not any((row.label, column.name) in recipe.published for row, column in own["None"])
        assert all("as described" in row.label or "mixture recorded" in row.label for row, _ in own["None"])
        assert not any("as described" in row.label for row, _ in own["released"])
        where = [{column.name for _, column in own[variant]} for variant in ("None", "released")]
        assert where[0] == where[1]

    @pytest.mark.parametrize("name", ["hbn/figure6", "fedcoda/figure4", "fedcoda/figure8", "fedwon/figure8"])
    def test_what_a_curve_is_about_is_evaluated_in_every_round(self, name: str) -> None:
        recipe = load(name)
        for row, column in recipe.cells():
            assert recipe.config(row, column).evaluate_every == 1
        assert any("every round" in text for text in (recipe.measure, recipe.protocol, *recipe.decisions))

    def test_univarfls_freeze_is_that_of_the_code_it_goes_back_to(self) -> None:
        for name in (name for name in EVERY if name.startswith("univarfl/table")):
            assert {row.options["method"] for row in load(name).rows if row.label == "Freeze"} == {"freeze(head=local)"}

    def test_the_search_runs_the_rates_that_were_tried_and_no_others(self) -> None:
        recipe = load("hbn/table8")
        tried = [column for row, column in cells_of(recipe) if row == "BN" and column.startswith("CIFAR-10 ")]
        assert tried == ["CIFAR-10 0.02", "CIFAR-10 0.01", "CIFAR-10 0.005", "CIFAR-10 0.001"]

    def test_per_client_tables_read_the_runs_of_the_table_they_belong_to(self) -> None:
        table2, table7 = load("greg/table2"), load("greg/table7")

        def runs(recipe: Recipe, where: str) -> set[str]:
            return {fingerprint(recipe.config(r, c)) for r, c in recipe.cells() if c.name.startswith(where)}

        assert runs(table7, "PACS") == runs(table2, "PACS")
        assert len(runs(table7, "PACS")) == len(table7.rows)


class TestFormat:
    def test_later_settings_win(self) -> None:
        recipe = parse("small", SMALL)
        found = {(row.label, column.name): recipe.config(row, column) for row, column in recipe.cells()}
        one, other, last = found["one", "digits A"], found["one", "digits B"], found["two", "digits B"]
        assert (one.rounds, one.batch_size, one.learning_rate, one.method) == (4, 2, 0.1, "fedavg")
        assert (other.rounds, other.batch_size, other.learning_rate) == (4, 8, 0.01)
        assert (last.rounds, last.batch_size, last.method) == (6, 4, "gn")

    def test_a_dash_is_no_cell_and_a_question_mark_no_number(self) -> None:
        recipe = parse("small", SMALL)
        assert cells_of(recipe) == [("one", "digits A"), ("one", "digits B"), ("two", "digits B")]
        assert recipe.published["one", "digits B"] == PublishedNumber("20.0±1.5", 20.0, 1.5)
        assert ("two", "digits B") not in recipe.published

    @pytest.mark.parametrize(
        ("old", "new", "named"),
        [
            ('caption = "A table"', "", "caption"),
            ('caption = "A table"', 'captoin = "A table"', "caption"),
            ("average = true", "avrage = true", "avrage"),
            ("rounds = 3", "round = 3", "rounds"),
            ('method = "fedavg"', "method = 3", "method"),
            ("10.0 20.0±1.5 15.0", "10.0 20.0", "2 published numbers for 3 columns"),
            ("20.0±1.5", "2O.0", "2O.0"),
            ('one = "10.0', 'on = "10.0', "one"),
            ('label = "B"', 'label = "A"', "twice"),
            ("on = { digits =", "on = { digit =", "digits"),
            ("[groups.digits]", "[groups.digit]", "digits"),
            ('group = "digits", label = "A"', 'read = "acuracy", label = "A"', "accuracy"),
            ("seeds = [0]", 'seeds = [0]\ndiagnostics = ["nmo"]', "nmi"),
            ("seeds = [0]", "seeds = [0", "is none: "),
            ("seeds = [0]", "seeds = 3", "'seeds' is 3: give a list"),
            ('caption = "A table"', "caption = [3]", "give no list"),
            ("columns = [", 'columns = [ "A",', "is none: "),
            ("{ rounds = 6 }", "6", "is none: "),
            ('"10.0 20.0±1.5 15.0"', "[10.0, 20.0]", "is none: "),
            ('label = "A"', 'label = "A", statistics = "batch"', "there is no evaluation under 'batch'"),
        ],
    )
    def test_a_mistake_is_named(self, old: str, new: str, named: str) -> None:
        assert old in SMALL
        with pytest.raises(FedkeelError, match=named):
            parse("small", SMALL.replace(old, new, 1))

    def test_a_variant_takes_over_what_it_does_not_change(self) -> None:
        parent, variant = load("greg/table3"), load("greg/table3-scratch")
        assert variant.published["FedAvg", "PACS A"] == parent.published["FedAvg", "PACS A"]
        assert not any(column.startswith("DomainNet") for _, column in variant.published)
        config = variant.config(variant.rows[0], variant.columns[0])
        assert (config.model, config.rounds, config.batch_size) == ("resnet18", 100, 16)
        assert variant.substitute

    @pytest.mark.parametrize("table", ["table1", "table2", "table3"])
    def test_greg_from_scratch_has_an_optimiser_for_that_and_the_papers_own_has_not(self, table: str) -> None:
        for name, settings in ((f"greg/{table}", (0.0, 0.0, False)), (f"greg/{table}-scratch", (0.9, 1e-5, True))):
            recipe = load(name)
            for row, column in recipe.cells():
                config = recipe.config(row, column)
                normalised = config.data.count("normalise(like=imagenet)") == 2 and "size=224" not in config.data
                assert (config.momentum, config.weight_decay, normalised) == settings
                assert config.learning_rate == (0.005 if column.label == "VLCS" else 0.01)

    def test_every_hbn_row_of_greg_is_of_the_released_code(self) -> None:
        found = [
            recipe.config(row, column).method
            for recipe in own_of("greg")
            for row, column in recipe.cells()
            if row.label == "HBN"
        ]
        assert len(found) > 20
        assert all("variant=released" in method for method in found)

    def test_fedwons_group_norms_and_mobilenet_are_those_of_its_appendix(self) -> None:
        found = {}
        for recipe in own_of("fedwon"):
            for row, column in recipe.cells():
                config = recipe.config(row, column)
                if config.method.startswith("gn"):
                    found[config.model] = config.method
        assert found == {
            "digits_cnn": "gn(groups=32, doubled=encoder.bn3)",
            "alexnet": "gn(groups=32, doubled=[encoder.bn3, encoder.bn4, encoder.bn5])",
            "resnet18": "gn(groups=32)",
            "timm:mobilenetv2_100(drop_rate=0.2)": "gn(groups=32)",
        }

    def test_a_wrong_name_gets_the_nearest(self) -> None:
        with pytest.raises(FedkeelError, match="did you mean 'hbn/table1'"):
            load("hbn/tabel1")
        with pytest.raises(FedkeelError, match="--list"):
            load("zzzzzzzzzzzzzzzz")
        with pytest.raises(FedkeelError, match="cannot be read"):
            load("./nowhere.toml")

    def test_a_recipe_is_not_like_itself(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one.toml", tmp_path / "two.toml"
        one.write_text(f'like = "{two}"')
        two.write_text(f'like = "{one}"')
        with pytest.raises(FedkeelError, match="is like itself"):
            read_recipe(str(one))

    def test_a_file_that_is_no_text_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(FedkeelError, match="cannot be read"):
            read_recipe(str(tmp_path / "mine.toml"))
