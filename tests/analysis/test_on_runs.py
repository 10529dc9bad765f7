"""What is measured of runs, against NumPy's own forward pass over the tensors that went by."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.cluster import KMeans

from fedkeel import FedkeelError, analysis, seeds
from fedkeel.analysis.features import clustering_nmi
from fedkeel.runs.run import Run
from tests import tiny
from tests.analysis.by_hand import (
    CONV,
    NORM,
    by_round,
    forward,
    images,
    last,
    losses,
    moved,
    mutual_information,
    probabilities,
    recorded_run,
)

FEDERATION = tiny.federation()
CLIENTS = {client.name: client for client in FEDERATION.clients}
SGD: dict[str, Any] = {"momentum": 0.0, "learning_rate": 0.1}
LARGE = {"ward": 40, "clinic": 30, "hospital": 50}
TABLE, CURVE = "accuracy (0 to 1) by domain and calibration", "accuracy (0 to 1) by way and images of the site"
MEAN = "gradient norm in training"


def analyse(name: str, run: Run, **options: Any) -> dict[str, Any]:
    return analysis.run(name, run, federation=tiny.federation(), model=tiny.model(), **options)


def final_model(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "model.safetensors")


def inputs_of_the_norm(entries: dict[str, torch.Tensor], pixels: torch.Tensor) -> np.ndarray:
    """(values, channels), by a sliding window in NumPy."""
    x = np.pad(pixels.numpy().astype(np.float64) / 255, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    kernel, bias = (entries[f"{CONV}.{name}"].double().numpy() for name in ("weight", "bias"))
    return (np.einsum("nchwij,ocij->nhwo", windows, kernel) + bias).reshape(-1, len(bias))


class TestStatistics:
    @pytest.mark.parametrize("method", ["fedavg", "fedbn"])
    def test_divergence_is_that_of_the_clients_running_statistics(self, tmp_path: Path, method: str) -> None:
        """Under FedBN of what the clients keep."""
        run, seen = recorded_run(tmp_path / "run", "statistics-divergence", method=method)
        document = analyse("statistics-divergence", run)
        for kind, buffer in (("mean", "running_mean"), ("variance", "running_var")):
            found = by_round(document, f"variance of {kind}s over clients by layer")
            assert set(found) == {0, 1, 2}
            for round, kept in seen.rounds.items():
                own = [update.get(f"{NORM}.{buffer}") for update in kept.updates.values()]
                own = [memory[f"local/{NORM}.{buffer}"] for memory in kept.local.values()] if None in own else own
                stacked = np.stack([tensor.double().numpy() for tensor in own])
                assert found[round][NORM] == pytest.approx(stacked.var(axis=0).mean(), rel=1e-9)
        means = last(document, "variance of means over clients by layer")
        assert analysis.number(document) == pytest.approx(np.mean(list(means.values())))

    def test_recorded_ones_are_the_updates_own(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "bn-statistics")
        found = last(analyse("bn-statistics", run), f"mean of {NORM} by channel")
        assert list(found) == list(CLIENTS)
        for client, values in found.items():
            expected = seen.rounds[2].updates[client][f"{NORM}.running_mean"]
            np.testing.assert_allclose(values, expected.double().numpy(), rtol=1e-12)

    def test_after_a_run_they_are_the_moments_of_what_each_layer_gets(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", batch_size=64)
        document, entries = analyse("bn-statistics", run), final_model(run)
        for name, client in CLIENTS.items():
            y = inputs_of_the_norm(entries, images(FEDERATION, client.train)[0])
            for kind, expected in (("mean", y.mean(axis=0)), ("variance", y.var(axis=0))):
                found = last(document, f"{kind} of {NORM} by channel")[name]
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)

    def test_two_clients_of_a_single_domain_are_shown(self, tmp_path: Path) -> None:
        def federation() -> Any:
            return tiny.federation(domains=dict.fromkeys(CLIENTS, "bright"))

        run = tiny.run(tmp_path / "run", on=federation(), rounds=1)
        document = analysis.run("bn-statistics", run, federation=federation(), model=tiny.model())
        assert list(last(document, f"mean of {NORM} by channel")) == ["ward", "clinic"]

    @pytest.mark.parametrize("method", ["fedavg", "hbn"])
    def test_the_bias_is_the_distance_from_the_moments_of_all_data(self, tmp_path: Path, method: str) -> None:
        run, seen = recorded_run(tmp_path / "run", "statistics-bias", method)
        every = torch.cat([images(FEDERATION, client.train)[0] for client in CLIENTS.values()])
        document = analysis.run("statistics-bias", run)
        for kind, entry, moment in (("mean", "running_mean", np.mean), ("variance", "running_var", np.var)):
            found = by_round(document, f"distance of {kind}s from the ideal by layer")
            for round, kept in seen.rounds.items():
                ideal = moment(inputs_of_the_norm(kept.model, every), axis=0)
                expected = np.abs(kept.model[f"{NORM}.{entry}"].double().numpy() - ideal).mean()
                assert found[round][NORM] == pytest.approx(expected, rel=1e-4, abs=1e-6)

    def test_mixing_factors_of_every_client(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "mixing-factors", method="hbn", batch_size=4, learning_rate=0.5)
        document = analyse("mixing-factors", run)
        for round, found in by_round(document, "weight by layer and client").items():
            shares = {
                name: float((1 / (1 + np.exp(-memory[f"local/{NORM}.alpha"].double().numpy()))).mean())
                for name, memory in seen.rounds[round].local.items()
            }
            assert found[NORM] == pytest.approx(shares, rel=1e-9)
        assert analysis.number(document) == pytest.approx(np.mean(list(shares.values())), rel=1e-9)
        assert len(set(by_round(document, "weight of the global statistics").values())) == 3  # it learns
        (run.directory / "diagnostics" / "mixing-factors.json").unlink()
        assert analysis.number(analyse("mixing-factors", run)) == analysis.number(
            document
        )  # from what clients remember


class TestLossGap:
    def test_at_test_time_and_in_training(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "loss-gap")
        document = analyse("loss-gap", run)
        at_test, in_training = (by_round(document, f"loss gap at {kind} by domain") for kind in ("test", "training"))
        for round, kept in seen.rounds.items():
            gaps: dict[str, list[float]] = {"test": [], "training": []}
            for name, client in CLIENTS.items():
                # The client's weights under the statistics that it was sent, not those it came back with.
                own = {**kept.updates[name], **{k: t for k, t in kept.sent.items() if "running" in k}}
                looks = (("test", kept.model, client.test, at_test), ("training", own, client.train, in_training))
                for kind, model, indices, found in looks:
                    x, y = images(FEDERATION, indices)
                    gap = (losses(forward(model, x)[1], y) - losses(forward(model, x, batch=True)[1], y)).mean()
                    assert found[round][client.domain] == pytest.approx(gap, abs=1e-5)
                    gaps[kind].append(gap)
            for kind, each in gaps.items():
                assert by_round(document, f"loss gap at {kind}")[round] == pytest.approx(np.mean(each), abs=1e-5)
        # What a recipe reads is of the last round.
        assert analysis.number(document) == at_test[2]["average"] == analysis.number(document, "test")
        assert analysis.number(document, "training") == in_training[2]["average"]

    def test_after_the_run_there_is_the_test_time_gap_alone(self, tmp_path: Path) -> None:
        """And an unseen domain is shown and stays out of the average."""

        def federation() -> Any:
            return tiny.federation(unseen=6)

        run = tiny.run(tmp_path / "run", on=federation())
        document = analysis.run("loss-gap", run, federation=federation(), model=tiny.model())
        assert list(document["rounds"][-1]["numbers"]) == ["loss gap at test", "loss gap at test by domain"]
        gaps, entries = last(document, "loss gap at test by domain"), final_model(run)
        for client in (*federation().clients, *federation().unseen):
            x, y = images(federation(), client.test)
            expected = losses(forward(entries, x)[1], y) - losses(forward(entries, x, batch=True)[1], y)
            assert gaps[client.domain] == pytest.approx(expected.mean(), abs=1e-5)
        seen = [gap for domain, gap in gaps.items() if domain not in ("foreign", "average")]
        assert gaps["average"] == pytest.approx(np.mean(seen))

    def test_the_floor_is_over_the_training_samples(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "probability-floor")
        for round, found in by_round(
            analyse("probability-floor", run), "smallest probability of the true class"
        ).items():
            kept, floors = seen.rounds[round], {"q_b": 1.0, "q_g": 1.0}
            for name, client in CLIENTS.items():
                own = {**kept.updates[name], **{k: t for k, t in kept.sent.items() if "running" in k}}
                x, y = images(FEDERATION, client.train)
                for kind in floors:
                    rows = probabilities(forward(own, x, batch=kind == "q_b")[1])
                    floors[kind] = min(floors[kind], *rows[range(len(y)), y.numpy()])
            assert found == pytest.approx(floors, rel=1e-4)

    def test_batches_are_shuffled_and_leave_no_single_sample(self, tmp_path: Path) -> None:
        """Nine samples in batches of four are four and five, in an order of the run's seed."""
        run, seen = recorded_run(tmp_path / "run", "loss-gap", batch_size=4, rounds=1)
        client, kept = CLIENTS["clinic"], seen.rounds[0]
        own = {**kept.updates["clinic"], **{k: t for k, t in kept.sent.items() if "running" in k}}
        order = client.train[torch.randperm(9, generator=seeds.generator(0, "diagnostic", "clinic"))]
        gaps: list[float] = []
        for part in (order[:4], order[4:]):
            x, y = images(FEDERATION, part)
            gaps += (losses(forward(own, x)[1], y) - losses(forward(own, x, batch=True)[1], y)).tolist()
        found = last(analyse("loss-gap", run), "loss gap at training by domain")["dark"]
        assert found == pytest.approx(np.mean(gaps), abs=1e-5)


class TestFeatures:
    def test_divergence_between_domains(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        document, entries = analyse("representation-divergence", run), final_model(run)
        found = last(document, "divergence by domain and domain")
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
        pairs = [found[i][j] for i, j in itertools.combinations(found, 2)]
        assert analysis.number(document) == pytest.approx(np.mean(pairs), rel=1e-9)
        other = analyse("representation-divergence(eps=10)", run)
        assert analysis.number(other) < analysis.number(document)

    def test_clients_of_one_domain_are_one_row(self, tmp_path: Path) -> None:
        def federation() -> Any:
            return tiny.federation(domains={"clinic": "bright"})

        run = tiny.run(tmp_path / "run", on=federation())
        document = analysis.run("representation-divergence", run, federation=federation(), model=tiny.model())
        assert list(last(document, "divergence by domain and domain")) == ["bright", "tinted"]

    @pytest.mark.parametrize("afterwards", [False, True])
    def test_prototypes_are_those_of_the_clients_models(self, tmp_path: Path, afterwards: bool) -> None:
        """After the run those of the global one."""
        run, seen = recorded_run(tmp_path / "run", "nmi" if afterwards else "prototype-similarity")
        document, local = analyse("prototype-similarity", run), dict[str, dict[int, np.ndarray]]()
        for name, client in CLIENTS.items():
            x, y = images(FEDERATION, client.train)
            features, _ = forward(final_model(run) if afterwards else seen.rounds[2].updates[name], x)
            local[name] = {c: features[y.numpy() == c].mean(axis=0) for c in set(y.tolist())}

        def cosine(a: np.ndarray, b: np.ndarray) -> float:
            return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

        by_class = []
        for c in range(4):
            having = [means[c] for means in local.values() if c in means]
            by_class.append(np.mean([cosine(a, b) for a, b in itertools.combinations(having, 2)]))
        assert analysis.number(document) == pytest.approx(np.mean(by_class), rel=1e-5)
        found = last(document, "cosine similarity by client and client")
        for one, other in itertools.combinations(local, 2):
            shared = local[one].keys() & local[other].keys()  # the clinic never sees the last class
            expected = np.mean([cosine(local[one][c], local[other][c]) for c in shared])
            assert found[one][other] == pytest.approx(expected, rel=1e-5)

    def test_nmi_and_map_speak_of_the_test_images(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        document, entries = analyse("nmi", run), final_model(run)
        found = last(document, "NMI by domain")
        tested = {c.domain: (forward(entries, images(FEDERATION, c.test)[0])[0], c.test) for c in CLIENTS.values()}
        every = (np.concatenate([x for x, _ in tested.values()]), torch.cat([test for _, test in tested.values()]))
        assert list(found) == [*tested, "all domains"]
        for domain, (features, test) in {**tested, "all domains": every}.items():
            clusters = KMeans(4, n_init=30, random_state=1).fit_predict(features)
            assert found[domain] == pytest.approx(mutual_information(clusters, FEDERATION.labels[test].numpy()))
        assert analysis.number(document) == found["all domains"]
        places = last(analyse("tsne", run), "map of the test features")
        assert places["domain"] == [domain for domain in ("bright", "dark", "tinted") for _ in range(8)]
        assert sorted(places["class"]) == sorted(tiny.CLASSES[i % 4] for i in range(24))
        few = [last(analyse("tsne", run, samples=10), "map of the test features") for _ in range(2)]
        assert few[0] == few[1]
        assert len(few[0]["x"]) == len(few[0]["y"]) == len(few[0]["class"]) == 10

    def test_nmi_of_features_that_are_all_the_same_is_zero(self) -> None:
        assert clustering_nmi(torch.ones(12, 3), torch.arange(12) % 3, 3) == pytest.approx(0)

    def test_singular_values_of_the_head(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run")
        document, weights = analyse("singular-values", run), final_model(run)["head.weight"].double().numpy()
        values = np.sqrt(np.linalg.eigvalsh(weights @ weights.T)[::-1])
        np.testing.assert_allclose(last(document, "singular value by index")["global model"], values, rtol=1e-6)
        shares = values / values.sum()
        assert analysis.number(document) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()), rel=1e-6)

    def test_labels_are_counted_over_the_training_images(self, tmp_path: Path) -> None:
        document = analyse("label-distribution", tiny.run(tmp_path / "run", rounds=1))
        counts = last(document, "training samples by client and class")
        for name, client in CLIENTS.items():
            labels = FEDERATION.labels[client.train].tolist()
            assert list(counts[name].values()) == [labels.count(c) for c in range(4)]
        assert list(counts["clinic"].values()) == [3, 3, 3, 0]


class TestGradientNorms:
    """With one local step of plain SGD, the gradient is the way that the weights went, over the learning rate."""

    def test_are_those_of_the_step(self, tmp_path: Path) -> None:
        run, seen = recorded_run(tmp_path / "run", "gradient-norms", **SGD)
        document = analysis.run("gradient-norms", run)
        for round, kept in seen.rounds.items():
            norms = {name: moved(kept.sent, update) / 0.1 for name, update in kept.updates.items()}
            assert by_round(document, "gradient norm as computed by client")[round] == pytest.approx(norms, rel=1e-4)
            mean, largest = np.mean(list(norms.values())), max(norms.values())
            assert by_round(document, MEAN)[round] == pytest.approx(mean, rel=1e-4)
            expected = {"as used": mean, "largest of a step": largest}
            assert by_round(document, "gradient norm")[round] == pytest.approx(expected, rel=1e-4)

    def test_clipping_shows_in_what_is_used_alone(self, tmp_path: Path) -> None:
        free, clipped = (
            analysis.run("gradient-norms", recorded_run(tmp_path / name, "gradient-norms", rounds=1, **options)[0])
            for name, options in (("free", SGD), ("clipped", {**SGD, "clip_norm": 0.1}))
        )
        assert last(clipped, MEAN) == pytest.approx(last(free, MEAN), rel=1e-6)
        assert last(clipped, "gradient norm")["as used"] == pytest.approx(0.1, rel=1e-4)
        assert last(free, "gradient norm")["as used"] > 0.2

    def test_the_mean_is_over_the_steps(self, tmp_path: Path) -> None:
        def plain() -> Any:
            return tiny.federation(augment="")

        options: dict[str, Any] = {**SGD, "rounds": 1, "on": plain()}
        run = tiny.run(tmp_path / "run", record="gradient-norms", **options)
        document, worker, largest = analysis.run("gradient-norms", run), tiny.setup(**options).worker, []
        for name, found in last(document, "gradient norm as computed by client").items():
            network, plan, norms = tiny.model(), worker.plan(name, 0), []
            for first, end in plan.bounds:
                x, y = images(plain(), plan.order[first:end])
                network.train(len(y) > 1)  # a single sample has no batch statistics
                loss = torch.nn.functional.cross_entropy(network(x / 255).logits, y)
                gradients = torch.autograd.grad(loss, list(network.parameters()))
                norms.append(np.linalg.norm(np.concatenate([g.double().numpy().ravel() for g in gradients])))
                with torch.no_grad():
                    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
            assert len(norms) > 1
            assert found == pytest.approx(np.mean(norms), rel=1e-4)
            largest.append(max(norms))
        assert last(document, "gradient norm")["largest of a step"] == pytest.approx(max(largest), rel=1e-4)

    @pytest.mark.parametrize("name", ["gradient-norms", "clipping"])
    def test_after_a_run_the_steps_are_gone(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(FedkeelError, match="recorded with --record"):
            analyse(name, tiny.run(tmp_path / "run", clip_norm=1.0))


def steps_by_hand(name: str, sent: dict[str, torch.Tensor], alpha: float, beta: float) -> tuple[float, float, float]:
    """Eq. 10 in its own loop: the shares of clipped steps and gradients, and the mean length of what clipping took."""
    on = tiny.federation(augment="")
    network, plan = tiny.model().double(), tiny.setup(on=on).worker.plan(name, 0)
    network.load_state_dict(sent)
    network.eval()  # calibrated: under the statistics that were sent
    history: list[float] = []
    steps, gradients, bias = [], [], []
    for first, end in plan.bounds:
        x, y = images(on, plan.order[first:end])
        loss = torch.nn.functional.cross_entropy(network(x.double() / 255).logits, y)
        found = torch.autograd.grad(loss, list(network.parameters()))
        norms = [float(g.norm()) for g in found]
        history = history or [float("inf")] * len(norms)  # the first step is never clipped
        factors = [min(alpha * gamma / norm, 1.0) for gamma, norm in zip(history, norms, strict=True)]
        history = history if bias else norms
        clipped = [g * factor for g, factor in zip(found, factors, strict=True)]
        history = [beta * gamma + (1 - beta) * norm for gamma, norm in zip(history, norms, strict=True)]
        gradients.append(np.mean([factor < 1 for factor in factors]))
        steps.append(any(factor < 1 for factor in factors))
        taken = np.concatenate([(g - c).numpy().ravel() for g, c in zip(found, clipped, strict=True)])
        bias.append(np.linalg.norm(taken))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), clipped, strict=True):
                parameter -= 0.1 * gradient
    return float(np.mean(steps)), float(np.mean(gradients)), float(np.mean(bias))


class TestClipping:
    def test_it_is_that_of_equation_10(self, tmp_path: Path) -> None:
        method = "fedcoda(calibrate_from=0, lambda_fa=0, lambda_pc=0, alpha=0.9, beta=0.5)"
        options: dict[str, Any] = {**SGD, "rounds": 1, "batch_size": 4, "on": tiny.federation(augment="")}
        run, seen = recorded_run(tmp_path / "run", "clipping,gradient-norms", method, weight_decay=0.0, **options)
        document = analysis.run("clipping", run)
        expected = {name: steps_by_hand(name, seen.rounds[0].sent, alpha=0.9, beta=0.5) for name in CLIENTS}
        steps, gradients, _ = np.mean(list(expected.values()), axis=0)
        assert 0 < gradients < steps < 1
        assert last(document, "share of clipped gradients (0 to 1)") == pytest.approx(gradients)
        bias = {name: bias for name, (_, _, bias) in expected.items()}
        assert last(document, "clipping bias by client") == pytest.approx(bias, rel=1e-4)
        assert analysis.number(document) == pytest.approx(100 * steps)

    def test_nothing_is_clipped_before_the_switch(self, tmp_path: Path) -> None:
        method = "fedcoda(calibrate_from=0.5, alpha=0.5)"
        run, _ = recorded_run(tmp_path / "run", "clipping", method, rounds=4, batch_size=4)
        shares = by_round(analysis.run("clipping", run), "share of clipped steps (0 to 1)")
        assert [shares[round] > 0 for round in range(4)] == [False, False, True, True]


def objective(network: torch.nn.Module, method: str) -> torch.Tensor:
    """L of Theorem 1, each client's data in one batch."""
    total, count = torch.zeros((), dtype=torch.float64), sum(len(client.train) for client in CLIENTS.values())
    for client in CLIENTS.values():
        x, y = images(FEDERATION, client.train)
        output = network(x.double() / 255)
        loss = -output.logits.log_softmax(1)[range(len(y)), y].mean()
        if method == "univarfl":
            classes, z = 4, output.features / output.features.norm(dim=1, keepdim=True)
            energy = (1 / (1 - z @ z.T + 1e-2)).mean()  # Eq. 3
            variance = torch.eye(classes).var(dim=0)[0] - output.logits.softmax(1).var(dim=0)  # Eqs. 1-2
            loss = loss + 0.5 * energy + classes / 4 * variance.clamp_min(0).mean()
        total = total + loss * len(y) / count
    return total


@pytest.mark.parametrize("method", ["fedavg", "univarfl"])
def test_the_global_gradient_is_that_of_the_objective(tmp_path: Path, method: str) -> None:
    run, seen = recorded_run(tmp_path / "run", "global-gradient", method)
    for round, found in by_round(analysis.run("global-gradient", run), "squared norm of the global gradient").items():
        network = tiny.model().double().train()  # batch statistics
        network.load_state_dict(seen.rounds[round].model)
        gradients = torch.autograd.grad(objective(network, method), list(network.parameters()))
        assert found == pytest.approx(sum(float(gradient.square().sum()) for gradient in gradients), rel=1e-3)


class TestCalibration:
    @pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedbn(unseen=initial)", "hbn"])
    def test_it_says_what_an_evaluation_under_each_says(self, method: str, tmp_path: Path) -> None:
        """As the run's own tests, by the same images: with the rule, and by the prior alone."""
        on = tiny.federation(LARGE, unseen=40)
        options: dict[str, Any] = {"on": on, "evaluate_with": "all", "site_images": 16, "learning_rate": 0.3}
        rule, prior = (tiny.run(tmp_path / f"{all}", method, site_always=all, **options) for all in (False, True))
        document = analysis.run("calibration", rule, images="16", federation=on, model=tiny.model())
        looks = (("as it is", rule, "global"), ("rule 16", rule, "site"), ("prior 16", prior, "site"))
        for way, run, kind in looks:
            tested = run.scores(statistics=kind)[-1]["domains"]
            assert tested.keys() == {"bright", "dark", "tinted", "foreign"}
            assert {d: last(document, TABLE)[d][way] for d in tested} == pytest.approx(tested)
            trained = [accuracy for domain, accuracy in tested.items() if domain != "foreign"]
            assert analysis.number(document, way) == pytest.approx(100 * np.mean(trained))
            assert analysis.number(document, f"foreign {way}") == pytest.approx(100 * tested["foreign"])
            assert analysis.number(document, f"unseen {way}") == analysis.number(document, f"foreign {way}")
        added = analysis.number(document, "rule 16") - analysis.number(document, "as it is")  # type: ignore[operator]
        assert analysis.number(document) == pytest.approx(added)

    @pytest.mark.parametrize("method", ["silobn", "gn(groups=2)", "central"])
    def test_it_works_whatever_becomes_of_statistics(self, method: str, tmp_path: Path) -> None:
        on = tiny.federation(LARGE, unseen=12)
        run = tiny.run(tmp_path / "r", method, on=on, rounds=2, record="calibration(images='4,all')")
        curve = last(analysis.run("calibration", run, federation=on, model=tiny.model()), CURVE)
        assert [list(steps) for steps in curve.values()] == [["0", "4", "all"]] * 3
        if method.startswith("gn"):  # nothing to calibrate: the curve is flat
            assert len({value for steps in curve.values() for value in steps.values()}) == 1

    @pytest.mark.parametrize("wrong", ["many", "4,-1", "1.5"])
    def test_numbers_of_images_that_are_none_are_refused(self, wrong: str, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="give numbers of images, or 'all'"):
            analyse("calibration", tiny.run(tmp_path / "run", rounds=1), images=wrong)
