from __future__ import annotations

import numpy as np
import pytest
import torch

from fedkeel.methods.fedgma import agreement_mask
from tests.methods.small import broadcast, names, started


def test_the_mask_is_one_from_the_threshold_on_and_the_agreement_below_it():
    signs = torch.tensor([[1.0, 1, 1, 1, 0], [2.0, 3, 5, -1, 0], [1.0, 1, -9, -1, 0], [7.0, -0.1, -1, -1, 0]])
    assert agreement_mask(signs, 0.5).tolist() == [1, 1, 0, 1, 0]  # agreements 1, 1/2, 0, 1/2, 0
    assert agreement_mask(signs, 0.6).tolist() == [1, 0.5, 0, 0.5, 0]
    assert agreement_mask(signs, 1.0).tolist() == [1, 0.5, 0, 0.5, 0]
    assert agreement_mask(torch.ones(49, 1), 1.0).item() == 1  # 49 times 1/49 is not 1


@pytest.mark.parametrize(("tau", "eta"), [(0.4, 1.0), (1.0, 0.5), (0.0, 1.5)])
def test_the_new_weights_are_those_of_the_formula(tmp_path, tau, eta):
    """By loops over entries in float64, from the updates that the clients really send."""
    run = started(f"fedgma(tau={tau}, server_lr={eta})", tmp_path)
    old = run.server.weights
    updates = [run.setup.worker.train(name, broadcast(run), {})[0] for name in names(run)]
    run.round(0)
    samples = np.array([update.samples for update in updates], dtype=float)
    damped = 0
    for name, new in run.server.weights.items():
        w = old[name].double().numpy().ravel()
        theirs = np.stack([update.weights[name].double().numpy().ravel() for update in updates])
        for i, value in enumerate(new.double().numpy().ravel()):
            agreement = abs(sum(np.sign(theirs[:, i] - w[i]))) / len(updates)
            mask = 1.0 if agreement >= tau else agreement
            damped += mask < 1
            expected = w[i] + eta * mask * (samples @ theirs[:, i] / samples.sum() - w[i])
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert (damped > 0) == (tau > 1 / 3)  # of three clients at least one third agrees
