from __future__ import annotations

import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.client import LocalClient
from fedkeel.core.types import Classifier
from fedkeel.nn import ScaledWSConv2d, batch_norms, fold
from tests.methods.small import Probe, broadcast, pixels, small_federation, started

MANY = small_federation([[0, 1, 2, 3] * 10] * 2)


def trained(method, directory, **options) -> dict[str, Tensor]:
    run = started(method, directory, MANY, **options)
    return run.setup.worker.train("client0", broadcast(run), {})[0].weights


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_without_standardisation_only_the_normalisation_goes(tmp_path):
    run = started("fedwon(standardise=false)", tmp_path)
    model = run.setup.worker.model
    assert not batch_norms(model)
    assert [type(module) for module in model.modules() if isinstance(module, nn.Conv2d)] == [nn.Conv2d] * 2
    assert not any(name.endswith("gain") for name, _ in model.named_parameters())


def test_a_folded_network_equals_the_unfolded_one_after_training(tmp_path):
    run = started("fedwon", tmp_path)
    for round in range(2):
        run.round(round)
    model = run.setup.worker.model.eval()
    assert not torch.equal(model.encoder[0].gain, torch.ones_like(model.encoder[0].gain))
    folded = fold(model)
    assert not any(isinstance(module, ScaledWSConv2d) for module in folded.modules())
    x = pixels(run.setup.federation, "client0")
    torch.testing.assert_close(folded(x).logits, model(x).logits)


def test_gradients_are_clipped_at_batch_32_and_not_at_batch_4(tmp_path):
    for size in (32, 4):
        automatic = trained("fedwon(clipping=0.01)", tmp_path / f"{size}-auto", batch_size=size)
        without = trained("fedwon(agc=false)", tmp_path / f"{size}-off", batch_size=size)
        always = trained("fedwon(clipping=0.01, agc=true)", tmp_path / f"{size}-on", batch_size=size)
        assert same(automatic, always) == (size == 32)
        assert same(automatic, without) == (size == 4)


def test_hbns_factor_is_not_clipped(tmp_path):
    lengths = []

    def look(client: LocalClient) -> None:
        lengths.append(float(client.model.get_parameter("encoder.1.alpha").grad.norm()))

    parts = [methods.build("fedwon(clipping=0.000001, agc=true)"), methods.build("hbn"), Probe(gradients=look)]
    trained(parts, tmp_path)
    assert max(lengths) > 1e-6  # Eq. 4 would allow 1e-6 times 1e-3


def test_a_gain_of_one_lets_the_signal_die_in_a_long_chain_and_1_71_keeps_it():
    """The variance behind a ReLU is 1/2 - 1/2pi of that before it; the square of the gain makes up for that."""
    spreads = {}
    for gain in (1.0, 1.71):
        torch.manual_seed(0)
        chain = [
            layer for _ in range(12) for layer in (nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        ]
        model = Classifier(nn.Sequential(*chain, nn.Flatten()), nn.Linear(32, 4), feature_dim=32, num_classes=4)
        methods.build(f"fedwon(gain={gain})").prepare(model)
        gains = [layer.gain for layer in model.modules() if isinstance(layer, ScaledWSConv2d)]
        assert len(gains) == 12
        assert all((tensor == gain).all() for tensor in gains)
        spreads[gain] = float(model(torch.randn(4096, 32, 1, 1)).features.detach().std())
    assert spreads[1.0] < 0.01
    assert 0.3 < spreads[1.71] < 3
