"""What is measured of runs, against NumPy's own forward pass over the tensors that went by."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.cluster import KMeans

from fedkeel import analysis, seeds
from fedkeel.runs.run import Run
from tests import tiny
from tests.analysis.by_hand import (
    NORM,
    Memory,
    bars_of,
    forward,
    images,
    lines_of,
    losses,
    matrix_of,
    mutual_information,
    probabilities,
    recorded_run,
)

FEDERATION = tiny.federation()
CLIENTS = {client.name: client for client in FEDERATION.clients}


def analyse(name: str, run: Run, **options: Any) -> dict[str, Any]:
    return analysis.run(name, run, federation=tiny.federation(), model=tiny.model(), **options)


def final_model(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "model.safetensors")


class TestStatistics:
    def test_divergence_is_that_of_the_updates_running_statistics(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "statistics-divergence")
        document = analyse("statistics-divergence", run)
        for figure, buffer in ((0, "running_mean"), (2, "running_var")):
            curve = lines_of(document, figure)[NORM]
            for round, kept in seen.rounds.items():
                stacked = np.stack([u[f"{NORM}.{buffer}"].double().numpy() for u in kept.updates.values()])
                assert curve[round] == pytest.approx(stacked.var(axis=0).mean(), rel=1e-9)
            assert set(curve) == {0, 1, 2}

    def test_after_a_run_they_are_the_moments_of_what_each_layer_gets(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", batch_size=64)
        values = analyse("bn-statistics", run, clients="ward,hospital")["figures"]
        assert [f["title"] for f in values] == [f"{NORM}: mean, round 3", f"{NORM}: variance, round 3"]
        entries = final_model(run)
        for series in ("ward", "hospital"):
            x, _ = images(FEDERATION, CLIENTS[series].train)
            padded = np.pad(x.numpy().astype(np.float64) / 255, ((0, 0), (0, 0), (1, 1), (1, 1)))
            kernel, bias = (entries[f"encoder.0.{n}"].double().numpy() for n in ("weight", "bias"))
            y = np.stack(
                [
                    np.einsum("nchw,ochw->no", padded[:, :, i : i + 3, j : j + 3], kernel) + bias
                    for i in range(8)
                    for j in range(8)
                ]
            )
            for figure, expected in zip(values, (y.mean(axis=(0, 1)), y.var(axis=(0, 1))), strict=True):
                line = next(line for line in figure["series"] if line["name"] == series)
                np.testing.assert_allclose(line["y"], expected, rtol=1e-4, atol=1e-6)

    def test_recorded_ones_are_the_updates_own(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "bn-statistics(clients='clinic,hospital')")
        figure = analyse("bn-statistics", run)["figures"][0]
        assert [line["name"] for line in figure["series"]] == ["clinic", "hospital"]
        for line in figure["series"]:
            expected = seen.rounds[2].updates[line["name"]][f"{NORM}.running_mean"]
            np.testing.assert_allclose(line["y"], expected.double().numpy(), rtol=1e-12)

    def test_what_a_client_keeps_counts_under_fedbn(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "statistics-divergence", method="fedbn")
        curve = lines_of(analyse("statistics-divergence", run))[NORM]
        own = [memory[f"local/{NORM}.running_mean"].double().numpy() for memory in seen.rounds[2].local.values()]
        assert len(own) == 3
        assert curve[2] == pytest.approx(np.stack(own).var(axis=0).mean(), rel=1e-9)

    def test_accuracy_under_both_kinds(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "statistics-accuracy", learning_rate=0.3)
        document = analyse("statistics-accuracy", run)
        found = bars_of(document, 1)
        for kind in ("global", "batch"):
            expected = {}
            for client in CLIENTS.values():
                x, y = images(FEDERATION, client.test)
                _, logits = forward(seen.rounds[2].model, x, batch=kind == "batch")
                expected[client.domain] = float(np.mean(logits.argmax(axis=1) == y.numpy()))
            assert found[f"{kind} statistics"] == pytest.approx(
                {**expected, "average": np.mean(list(expected.values()))}
            )
        assert lines_of(document)["global statistics"][2] == pytest.approx(run.accuracy)


class TestLossGap:
    def test_at_test_time_and_in_training(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "loss-gap")
        document = analyse("loss-gap", run)
        at_test, in_training = lines_of(document, 0), lines_of(document, 1)
        for round, kept in seen.rounds.items():
            gaps = {"test": [], "training": []}
            for name, client in CLIENTS.items():
                x, y = images(FEDERATION, client.test)
                gap = (losses(forward(kept.model, x)[1], y) - losses(forward(kept.model, x, batch=True)[1], y)).mean()
                assert at_test[client.domain][round] == pytest.approx(gap, abs=1e-5)
                gaps["test"].append(gap)
                # The client's weights under the statistics that it was sent, not those it came back with.
                own = {**kept.updates[name], **{k: t for k, t in kept.sent.items() if "running" in k}}
                x, y = images(FEDERATION, client.train)
                gap = (losses(forward(own, x)[1], y) - losses(forward(own, x, batch=True)[1], y)).mean()
                assert in_training[client.domain][round] == pytest.approx(gap, abs=1e-5)
                gaps["training"].append(gap)
            assert at_test["average"][round] == pytest.approx(np.mean(gaps["test"]), abs=1e-5)
            assert in_training["average"][round] == pytest.approx(np.mean(gaps["training"]), abs=1e-5)
        # What a recipe reads is of the last round.
        assert analysis.number(document) == at_test["average"][round] == analysis.number(document, "test")
        assert analysis.number(document, "training") == in_training["average"][round]

    def test_after_the_run_there_is_the_test_time_gap_alone(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        (figure,) = analyse("loss-gap", run)["figures"]
        entries = final_model(run)
        for domain, gap in zip(figure["categories"][:-1], figure["series"][0]["values"], strict=False):
            x, y = images(FEDERATION, next(c for c in CLIENTS.values() if c.domain == domain).test)
            expected = losses(forward(entries, x)[1], y) - losses(forward(entries, x, batch=True)[1], y)
            assert gap == pytest.approx(expected.mean(), abs=1e-5)

    def test_an_unseen_domain_is_shown_and_stays_out_of_the_average(self, tmp_path: Path) -> None:
        def federation() -> Any:
            return tiny.federation(unseen=6)

        run = tiny.run(tmp_path / "run", on=federation())
        document = analysis.run("loss-gap", run, federation=federation(), model=tiny.model())
        gaps = bars_of(document)["gap"]
        assert "foreign" in gaps
        seen = [gap for domain, gap in gaps.items() if domain not in ("foreign", "average")]
        assert gaps["average"] == pytest.approx(np.mean(seen))

    def test_the_floor_and_the_bound(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "probability-floor")
        document = analyse("probability-floor", run)
        floors, bound = lines_of(document, 0), lines_of(document, 1)
        for round, kept in seen.rounds.items():
            q_b, q_g, gaps, limits = [], [], [], []
            for name, client in CLIENTS.items():
                own = {**kept.updates[name], **{k: t for k, t in kept.sent.items() if "running" in k}}
                x, y = images(FEDERATION, client.train)
                p_b, p_g = (probabilities(forward(own, x, batch=batch)[1]) for batch in (True, False))
                for b, g, label in zip(p_b, p_g, y.tolist(), strict=True):
                    regulariser = 0.5 * float((b * np.log(b / g)).sum() + (g * np.log(g / b)).sum())
                    q_b.append(b[label])
                    q_g.append(g[label])
                    gaps.append(abs(np.log(b[label] / g[label])))
                    limits.append(2 / min(b[label], g[label]) * np.sqrt(regulariser))
            assert floors["smallest q_b^y"][round] == pytest.approx(min(q_b), rel=1e-4)
            assert floors["smallest q_g^y"][round] == pytest.approx(min(q_g), rel=1e-4)
            assert bound["mean |gap|"][round] == pytest.approx(np.mean(gaps), rel=1e-4)
            assert bound["mean bound"][round] == pytest.approx(np.mean(limits), rel=1e-3)
        rows = dict(document["figures"][2]["rows"])
        assert rows["samples within the bound"] == 1


class TestRepresentation:
    def test_divergence_between_domains(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        found, entries = matrix_of(analyse("representation-divergence", run)), final_model(run)
        features = {c.domain: forward(entries, images(FEDERATION, c.test)[0])[0] for c in CLIENTS.values()}
        for i, one in features.items():
            for j, other in features.items():
                total = 0.0
                for a, b in zip(one.T, other.T, strict=True):
                    v, w, d = a.var() + 1e-5, b.var() + 1e-5, (a.mean() - b.mean()) ** 2
                    # log terms of the two divergences cancel
                    total += (np.log(np.sqrt(w / v)) + (v + d) / (2 * w) - 0.5) + (
                        np.log(np.sqrt(v / w)) + (w + d) / (2 * v) - 0.5
                    )
                assert found[i][j] == pytest.approx(total / one.shape[1], rel=1e-3, abs=1e-6)

    def test_clients_of_one_domain_are_one_row(self, tmp_path: Path) -> None:
        def federation() -> Any:
            return tiny.federation(domains={"clinic": "bright"})

        run = tiny.run(tmp_path / "run", on=federation())
        document = analysis.run("representation-divergence", run, federation=federation(), model=tiny.model())
        assert document["figures"][0]["rows"] == ["bright", "tinted"]

    def test_prototypes_of_the_clients_own_models(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "prototype-similarity")
        document = analyse("prototype-similarity", run)
        mean, apart = lines_of(document, 0)["mean"], lines_of(document, 1)
        for round, kept in seen.rounds.items():
            local: dict[str, dict[int, np.ndarray]] = {}
            for name, client in CLIENTS.items():
                x, y = images(FEDERATION, client.train)
                features, _ = forward(kept.updates[name], x)
                local[name] = {c: features[y.numpy() == c].mean(axis=0) for c in set(y.tolist())}
            by_class, away = [], {name: [] for name in local}
            for c in range(4):
                having = [name for name in local if c in local[name]]
                units = [local[name][c] / np.linalg.norm(local[name][c]) for name in having]
                by_class.append(np.mean([a @ b for i, a in enumerate(units) for b in units[:i]]))
                center = sum(local[name][c] for name in having) / len(having)
                for name in having:
                    away[name].append(np.linalg.norm(local[name][c] - center))
            assert mean[round] == pytest.approx(np.mean(by_class), rel=1e-5)
            for name, distances in away.items():
                assert apart[name][round] == pytest.approx(np.mean(distances), rel=1e-4)
        assert document["figures"][2]["note"] == f"Mean over classes and pairs: {mean[2]:.4f}."

    def test_after_the_run_the_prototypes_are_those_of_the_global_model(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        found, entries = matrix_of(analyse("prototype-similarity", run), 1), final_model(run)
        means: dict[str, dict[int, np.ndarray]] = {}
        for name, client in CLIENTS.items():
            x, y = images(FEDERATION, client.train)
            features, _ = forward(entries, x)
            means[name] = {c: features[y.numpy() == c].mean(axis=0) for c in set(y.tolist())}
        for one, other in itertools.combinations(means, 2):
            shared = means[one].keys() & means[other].keys()
            pairs = [(means[one][c], means[other][c]) for c in shared]
            cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
            assert found[one][other] == pytest.approx(np.mean(cosines), rel=1e-5)

    def test_nmi_and_map_speak_of_the_test_images(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        found = bars_of(analyse("nmi", run))["NMI"]
        assert list(found) == ["bright", "dark", "tinted", "all domains"]
        entries = final_model(run)
        tested = {c.domain: (forward(entries, images(FEDERATION, c.test)[0])[0], c.test) for c in CLIENTS.values()}
        every = (np.concatenate([x for x, _ in tested.values()]), torch.cat([test for _, test in tested.values()]))
        for domain, (features, test) in {**tested, "all domains": every}.items():
            clusters = KMeans(4, n_init=30, random_state=1).fit_predict(features)
            assert found[domain] == pytest.approx(mutual_information(clusters, FEDERATION.labels[test].numpy()))
        (figure,) = analyse("tsne", run)["figures"]
        assert figure["domain"] == [domain for domain in ("bright", "dark", "tinted") for _ in range(8)]
        assert sorted(figure["class"]) == sorted(tiny.CLASSES[i % 4] for i in range(24))
        assert figure["note"].endswith(f"{found['all domains']:.3f}.")
        (figure,) = analyse("tsne", run, samples=10, domains="dark,tinted")["figures"]
        assert len(figure["x"]) == 10
        assert set(figure["domain"]) == {"dark", "tinted"}

    def test_singular_values_of_the_head(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        (line,) = analyse("singular-values", run)["figures"][0]["series"]
        weights = final_model(run)["head.weight"].double().numpy()
        np.testing.assert_allclose(line["y"], np.sqrt(np.linalg.eigvalsh(weights @ weights.T)[::-1]), rtol=1e-6)
        assert line["x"] == [1, 2, 3, 4]


class TestGradientNorms:
    """With one local step of plain SGD, the gradient is the way that the weights went, over the learning rate."""

    def norms(self, directory: Path, **options: Any) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
        run, seen = recorded_run(directory, "gradient-norms", momentum=0.0, learning_rate=0.1, **options)
        moved: dict[str, dict[int, float]] = {name: {} for name in CLIENTS}
        for round, kept in seen.rounds.items():
            for name, update in kept.updates.items():
                weights = [k for k in update if "running" not in k and "num_batches" not in k]
                way = np.concatenate([(kept.sent[k] - update[k]).double().numpy().ravel() for k in weights])
                moved[name][round] = float(np.linalg.norm(way) / 0.1)
        document = analysis.run("gradient-norms", run)
        return {**lines_of(document, 0), **lines_of(document, 1)}, moved

    def test_are_those_of_the_step(self, tmp_path: Path) -> None:
        found, moved = self.norms(tmp_path / "run")
        for name in CLIENTS:
            assert found[name] == pytest.approx(moved[name], rel=1e-4)
        means = {round: np.mean([moved[name][round] for name in CLIENTS]) for round in range(3)}
        assert found["as computed"] == pytest.approx(means, rel=1e-4)
        assert found["as used"] == pytest.approx(means, rel=1e-4)
        largest = {round: max(moved[name][round] for name in CLIENTS) for round in range(3)}
        assert found["largest of a step"] == pytest.approx(largest, rel=1e-4)

    def test_clipping_shows_in_what_is_used_alone(self, tmp_path: Path) -> None:
        free, _ = self.norms(tmp_path / "free", rounds=1)
        limit = free["as computed"][0] / 10
        clipped, moved = self.norms(tmp_path / "clipped", rounds=1, clip_norm=limit)
        assert clipped["as computed"][0] == pytest.approx(free["as computed"][0], rel=1e-6)
        assert clipped["as used"][0] == pytest.approx(limit, rel=1e-4)
        assert np.mean([moved[name][0] for name in CLIENTS]) == pytest.approx(limit, rel=1e-3)

    def test_the_mean_is_over_the_steps(self, tmp_path: Path) -> None:
        def plain() -> Any:
            return tiny.federation(augment="")

        options: dict[str, Any] = {"momentum": 0.0, "learning_rate": 0.1, "rounds": 1, "on": plain()}
        run = tiny.run(tmp_path / "run", record="gradient-norms", **options)
        document = analysis.run("gradient-norms", run)
        worker = tiny.setup(**options).worker
        largest = []
        for name, line in lines_of(document, 1).items():
            network, plan, norms = tiny.model(), worker.plan(name, 0), []
            for first, last in plan.bounds:
                x, y = images(plain(), plan.order[first:last])
                network.train(len(y) > 1)  # a single sample has no batch statistics
                loss = torch.nn.functional.cross_entropy(network(x / 255).logits, y)
                gradients = torch.autograd.grad(loss, list(network.parameters()))
                norms.append(np.linalg.norm(np.concatenate([g.double().numpy().ravel() for g in gradients])))
                with torch.no_grad():
                    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
            assert len(norms) > 1
            assert line[0] == pytest.approx(np.mean(norms), rel=1e-4)
            largest.append(max(norms))
        assert lines_of(document)["largest of a step"][0] == pytest.approx(max(largest), rel=1e-4)

    def test_the_round_of_the_switch_is_named(self, tmp_path: Path) -> None:
        run, _ = recorded_run(tmp_path / "run", "gradient-norms", method="fedcoda(calibrate_from=0.6)", rounds=4)
        figure = analysis.run("gradient-norms", run)["figures"][0]
        assert figure["note"] == "Batch norm switches to global statistics in round 4."


class TestGradientNormsAfterwards:
    """Of the models that a run has kept: their gradients over the clients' data, nothing trained."""

    def test_under_batch_statistics_the_norm_is_that_of_the_step_that_comes_next(self, tmp_path: Path) -> None:
        def plain() -> Any:
            return tiny.federation(augment="")

        options: dict[str, Any] = {"momentum": 0.0, "learning_rate": 0.1, "batch_size": 64}
        memory = Memory()
        tiny.run(tmp_path / "longer", on=plain(), rounds=3, observer=memory, **options)
        run = tiny.run(tmp_path / "run", on=plain(), rounds=2, **options)
        document = analysis.run("gradient-norms", run, federation=plain(), model=tiny.model())
        line, bars = lines_of(document)["under batch statistics"], bars_of(document, 1)["under batch statistics"]
        for round in (0, 1):
            after = memory.rounds[round + 1]
            moved = {}
            for name, update in after.updates.items():
                weights = [k for k in update if "running" not in k and "num_batches" not in k]
                way = np.concatenate([(after.sent[k] - update[k]).double().numpy().ravel() for k in weights])
                moved[name] = np.linalg.norm(way) / 0.1
            assert line[round] == pytest.approx(np.mean(list(moved.values())), rel=1e-4)
        assert bars == pytest.approx(moved, rel=1e-4)

    def test_under_global_statistics_it_is_that_of_finite_differences(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", batch_size=64, learning_rate=0.2)
        found = bars_of(analyse("gradient-norms", run), 1)["under global statistics"]
        x, y = images(FEDERATION, CLIENTS["clinic"].train)
        entries = {name: tensor.double().numpy().copy() for name, tensor in final_model(run).items()}
        total, step = 0.0, 1e-5
        for name in (name for name in entries if "running" not in name and "num_batches" not in name):
            for place in np.ndindex(entries[name].shape):
                value, ends = entries[name][place], []
                for shift in (step, -step):
                    entries[name][place] = value + shift
                    ends.append(losses(forward(entries, x)[1], y).mean())
                entries[name][place] = value
                total += ((ends[0] - ends[1]) / (2 * step)) ** 2
        assert found["clinic"] == pytest.approx(np.sqrt(total), rel=1e-3)

    def test_it_is_the_mean_over_batches(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", batch_size=4)
        found = bars_of(analyse("gradient-norms", run), 1)["under global statistics"]["ward"]
        network = tiny.model()
        network.load_state_dict(final_model(run))
        order = CLIENTS["ward"].train[torch.randperm(14, generator=seeds.generator(0, "diagnostic", "ward"))]
        norms = []
        for part in (order[:4], order[4:8], order[8:12], order[12:]):
            x, y = images(FEDERATION, part)
            loss = torch.nn.functional.cross_entropy(network.eval()(x / 255).logits, y)
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            norms.append(np.linalg.norm(np.concatenate([g.double().numpy().ravel() for g in gradients])))
        assert found == pytest.approx(np.mean(norms), rel=1e-4)

    def test_it_says_of_which_rounds_there_is_a_model(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", "fedcoda(calibrate_from=0.6)", rounds=5)
        figure = analyse("gradient-norms", run)["figures"][0]
        assert figure["note"].startswith("Made after the run, which has kept the model of rounds 4, 5: 2 points.")
        assert figure["note"].endswith("Batch norm switches to global statistics in round 4.")
        assert list(lines_of({"figures": [figure]})["under global statistics"]) == [3, 4]
        shutil.rmtree(run.directory / "checkpoints")
        figure = analyse("gradient-norms", run)["figures"][0]
        assert figure["note"].startswith("Made after the run, which has kept the model of round 5: one point.")

    def test_what_was_recorded_is_shown_instead(self, tmp_path: Path) -> None:
        run, _ = recorded_run(tmp_path / "run", "gradient-norms")
        assert list(lines_of(analyse("gradient-norms", run))) == ["as computed", "as used", "largest of a step"]

    def test_a_model_without_batch_norm_has_one_line(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", network=tiny.model(norm=False))
        document = analysis.run("gradient-norms", run, federation=tiny.federation(), model=tiny.model(norm=False))
        assert list(lines_of(document)) == ["at the model"]

    def test_a_look_leaves_the_run_as_it_was(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", "fedbn")
        before = tiny.result(run)
        first, second = (analyse("gradient-norms", run) for _ in range(2))
        assert first == second
        assert tiny.result(run) == before


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedbn(unseen=initial)", "hbn"])
def test_calibration_is_that_of_the_evaluation(method: str, tmp_path: Path) -> None:
    """Also of a domain that never trained, whose client has no layers of its own."""
    on: dict[str, Any] = {"federation": tiny.federation(unseen=40, test=40), "model": tiny.model()}
    run = tiny.run(tmp_path, method, on=on["federation"], evaluate_with="all", site_images=6, learning_rate=0.3)
    found = bars_of(analysis.run("calibration(images='6')", run, **on), 2)
    for told, kind in (("as it is", "global"), ("calibrated by the rule", "site")):
        assert found[told] == pytest.approx(run.scores(statistics=kind)[-1]["domains"])
    assert found["as it is"] != found["calibrated by the rule"]


def test_labels_are_counted_over_the_training_images(tmp_path: Path) -> None:
    counts = matrix_of(analyse("label-distribution", tiny.run(tmp_path / "run", rounds=1)))
    for name, client in CLIENTS.items():
        labels = FEDERATION.labels[client.train].tolist()
        assert list(counts[name].values()) == [labels.count(c) for c in range(4)]
    assert list(counts["clinic"].values()) == [3, 3, 3, 0]  # it never sees the last class


def test_mixing_factors_of_every_client(tmp_path: Path) -> None:
    run, seen = recorded_run(tmp_path / "run", "mixing-factors", method="hbn", batch_size=4, learning_rate=0.5)
    document = analyse("mixing-factors", run)
    curve, final = lines_of(document, 0)[NORM], bars_of(document, 1)
    for round, kept in seen.rounds.items():
        shares = {
            name: float((1 / (1 + np.exp(-memory[f"local/{NORM}.alpha"].double().numpy()))).mean())
            for name, memory in kept.local.items()
        }
        assert curve[round] == pytest.approx(np.mean(list(shares.values())), rel=1e-9)
    assert {name: values[NORM] for name, values in final.items()} == pytest.approx(shares, rel=1e-9)
    assert len(set(curve.values())) == 3  # it learns
    for file in (run.directory / "diagnostics").iterdir():
        file.unlink()
    assert bars_of(analyse("mixing-factors", run)) == final  # from the last checkpoint


def test_batches_of_batch_statistics_are_shuffled_and_leave_no_single_sample(tmp_path: Path) -> None:
    """Nine samples in batches of four are four and five, in an order of the run's seed."""
    run, seen = recorded_run(tmp_path / "run", "loss-gap", batch_size=4, rounds=1)
    client, kept = CLIENTS["clinic"], seen.rounds[0]
    own = {**kept.updates["clinic"], **{k: t for k, t in kept.sent.items() if "running" in k}}
    order = client.train[torch.randperm(9, generator=seeds.generator(0, "diagnostic", "clinic"))]
    gaps = []
    for part in (order[:4], order[4:]):
        x, y = images(FEDERATION, part)
        gaps += (losses(forward(own, x)[1], y) - losses(forward(own, x, batch=True)[1], y)).tolist()
    found = bars_of(analyse("loss-gap", run), 1)["gap"]["dark"]
    assert found == pytest.approx(np.mean(gaps), abs=1e-5)
