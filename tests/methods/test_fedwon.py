from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.client import LocalClient
from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.nn import ScaledWSConv2d, batch_norms, fold
from tests.methods.small import Probe, broadcast, pixels, small_federation, small_model, started

MANY = small_federation([[0, 1, 2, 3] * 10] * 2)


def trained(method, directory, **options) -> dict[str, Tensor]:
    run = started(method, directory, MANY, **options)
    return run.setup.worker.train("client0", broadcast(run), {})[0].weights


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, lambda c: nn.GroupNorm(2, c)])
def test_normalisation_goes_and_convolutions_standardise(tmp_path, norm):
    run = started("fedwon", tmp_path, model=small_model(norm))
    model = run.setup.worker.model
    assert not batch_norms(model)
    assert not any("Norm" in type(module).__name__ for module in model.modules())
    assert [type(module) for module in model.modules() if isinstance(module, nn.Conv2d)] == [ScaledWSConv2d] * 2
    assert run.server.statistics == {}


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
    x = pixels(run.federation, "client0")
    torch.testing.assert_close(folded(x).logits, model(x).logits)


def test_gradients_are_clipped_at_batch_32_and_not_at_batch_4(tmp_path):
    for size in (32, 4):
        automatic = trained("fedwon(clipping=0.01)", tmp_path / f"{size}-auto", batch_size=size)
        without = trained("fedwon(agc=false)", tmp_path / f"{size}-off", batch_size=size)
        always = trained("fedwon(clipping=0.01, agc=true)", tmp_path / f"{size}-on", batch_size=size)
        assert same(automatic, always) == (size == 32)
        assert same(automatic, without) == (size == 4)


def test_no_gradient_is_longer_than_its_unit_allows(tmp_path):
    ratios: dict[str, float] = {}

    def look(client: LocalClient) -> None:
        for name, parameter in client.model.named_parameters():
            axes = tuple(range(1, parameter.ndim)) or (0,)
            length, size = (torch.linalg.vector_norm(t.detach(), dim=axes) for t in (parameter.grad, parameter))
            length = length / size.clamp_min(1e-3)
            ratios[name] = max(ratios.get(name, 0.0), float(length.max()))

    trained([methods.build("fedwon", clipping=0.02, agc=True), Probe(gradients=look)], tmp_path)
    assert max(ratios.values()) == pytest.approx(0.02, rel=1e-4)


def test_hbns_factor_is_not_clipped(tmp_path):
    lengths = []

    def look(client: LocalClient) -> None:
        lengths.append(float(client.model.get_parameter("encoder.1.alpha").grad.norm()))

    parts = [methods.build("fedwon(clipping=0.000001, agc=true)"), methods.build("hbn"), Probe(gradients=look)]
    trained(parts, tmp_path)
    assert max(lengths) > 1e-6  # Eq. 4 would allow 1e-6 times 1e-3


def test_batch_size_1_works(tmp_path):
    run = started("fedwon", tmp_path, batch_size=1, learning_rate=0.005)
    before = run.server.weights
    run.round(0)
    assert not same(before, run.server.weights)
    assert all(torch.isfinite(tensor).all() for tensor in run.server.weights.values())


def test_named_convolutions_stay_plain(tmp_path):
    run = started("fedwon(skip=encoder.5)", tmp_path)
    assert type(run.setup.worker.model.encoder[5]) is nn.Conv2d
    assert type(run.setup.worker.model.encoder[0]) is ScaledWSConv2d
    with pytest.raises(FedkeelError, match=r"encoder\.4"):
        methods.build("fedwon(skip=encoder.4)").prepare(small_model())


def test_pretrained_weights_can_be_kept():
    model, given = small_model(), small_model().encoder[0].weight
    methods.build("fedwon(init=keep)").prepare(model)
    assert torch.equal(model.encoder[0].weight, given)


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


def test_depthwise_convolutions_standardise_and_fold():
    encoder = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, groups=6), nn.Flatten()
    )
    model = Classifier(encoder, nn.Linear(96, 4), feature_dim=96, num_classes=4)
    methods.build("fedwon").prepare(model)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(fold(model)(x).logits, model(x).logits)


def test_a_model_of_a_head_alone_is_refused():
    model = Classifier(nn.Flatten(), nn.Linear(192, 4), feature_dim=192, num_classes=4)
    with pytest.raises(MethodError, match="no convolution to standardise"):
        methods.build("fedwon").prepare(model)
