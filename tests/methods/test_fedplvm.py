from __future__ import annotations

import math

import pytest
import torch

from fedkeel.core.checking import check
from fedkeel.engine.rounds import Federated
from fedkeel.formulas.clustering import cluster_means
from tests.methods.small import broadcast, pixels, small_federation, started
from tests.methods.steps import (
    cosine,
    cross_entropy,
    global_output,
    train,
)


def expected_loss(run: Federated, name: str, lambda_: float, alpha: float = 0.25, tau: float = 0.07) -> float:
    """CE + lambda (L_alpha + L_c) by loops; all of the client's data are one batch."""
    labels = run.setup.federation.labels[run.setup.federation[name].train].tolist()
    output = global_output(run, pixels(run.setup.federation, name))
    extras = run.server.extras
    pairs = list(zip(extras["fedplvm/prototypes"].double().tolist(), extras["fedplvm/classes"].tolist(), strict=True))
    pairs = [(p, c) for p, c in pairs if c >= 0]
    terms = []
    for z, y in zip(output.features.double().tolist(), labels, strict=True):
        own = [p for p, c in pairs if c == y]
        if not own:
            continue
        above = sum(math.exp(cosine(z, p) ** alpha / tau) for p in own)
        below = sum(math.exp(cosine(z, p) ** alpha / tau) for p, _ in pairs)
        mean = [sum(values) / len(own) for values in zip(*own, strict=True)]
        terms.append(-math.log(above / below) + 2 * (cosine(z, mean) - 1) ** 2)
    return cross_entropy(output.logits, labels) + lambda_ * sum(terms) / len(terms)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("fedplvm", {"lambda_": 100}),
        ("fedplvm(lambda_=1, alpha=0.5, temperature=0.5)", {"lambda_": 1, "alpha": 0.5, "tau": 0.5}),
        ("fedplvm(lambda_=2, alpha=1)", {"lambda_": 2, "alpha": 1}),
    ],
)
def test_the_loss_of_a_real_step_is_that_of_the_paper(tmp_path, text, options):
    federation = small_federation([[0, 1, 2, 3] * 5] * 3)
    run = started(text, tmp_path, federation, batch_size=64)
    assert train(run).metrics["loss"] == pytest.approx(
        cross_entropy(global_output(run, pixels(federation, "client0")).logits, [0, 1, 2, 3] * 5), rel=1e-5
    )
    run.round(0)
    wanted = expected_loss(run, "client0", **options)
    assert wanted - expected_loss(run, "client0", 0) > 0.1
    assert train(run, round=1).metrics["loss"] == pytest.approx(wanted, rel=1e-4)


def test_a_client_sends_the_clusters_of_its_features_class_by_class(tmp_path):
    federation = small_federation([[1, 0, 1, 1, 0, 1, 1, 1, 1, 0], [0, 3]])
    run = started("fedplvm", tmp_path, federation)
    update = train(run)
    check(update, broadcast(run))
    model = run.setup.worker.model
    model.load_state_dict({**update.weights, **update.statistics})
    features = model.eval()(pixels(federation, "client0")).features.detach()
    labels = federation.labels[federation["client0"].train]
    expected = [cluster_means(features[labels == c]) for c in (0, 1)]
    torch.testing.assert_close(update.extras["fedplvm/prototypes"], torch.cat(expected))
    assert update.extras["fedplvm/classes"].tolist() == [0] * len(expected[0]) + [1] * len(expected[1])
    assert len(expected[1]) > 1


def test_the_server_clusters_all_of_them_once_more(tmp_path):
    federation = small_federation([[0, 1] * 12] * 4)
    run = started("fedplvm", tmp_path, federation)
    sent = [train(run, f"client{k}").extras for k in range(4)]
    run.round(0)
    extras = run.server.extras
    for c in (0, 1):
        local = torch.cat([e["fedplvm/prototypes"][e["fedplvm/classes"] == c] for e in sent])
        own = extras["fedplvm/prototypes"][extras["fedplvm/classes"] == c]
        torch.testing.assert_close(own, cluster_means(local))
        assert len(own) < len(local)
    size = len(extras["fedplvm/classes"])
    assert size & (size - 1) == 0


def test_features_that_point_away_from_a_prototype_do_no_harm(tmp_path):
    """Without a ReLU before the head cosines are negative, and have no fourth root."""
    model = started("fedavg", tmp_path / "model").setup.worker.model
    del model.encoder[7]
    run = started("fedplvm(lambda_=1)", tmp_path / "run", model=model)
    run.round(0)
    features = global_output(run, pixels(run.setup.federation, "client0")).features
    prototypes = run.server.extras["fedplvm/prototypes"]
    assert (features @ prototypes.T).min() < 0
    run.round(1)
    assert all(torch.isfinite(tensor).all() for tensor in run.server.weights.values())
