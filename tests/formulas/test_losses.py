"""Each loss against the paper's formula written out as loops in NumPy float64, and its corner cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkeel.formulas import losses
from fedkeel.formulas import prototypes as prototype_losses

quick = settings(deadline=None, max_examples=25)

BATCH, CLASSES, WIDTH = 7, 4, 5
seeds = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_labels(n: int = BATCH, classes: int = CLASSES, seed: int = 0) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def gradient(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = leaf(x)
    (result,) = torch.autograd.grad(loss(x), x)
    return result


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp(row - row.max())
    return e / e.sum()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    lengths = np.sqrt((a * a).sum() * (b * b).sum())
    return float(a @ b / lengths) if lengths > 0 else 0.0


class Example(NamedTuple):
    """Inputs of every training loss: x (B, d) takes gradients, the rest are constants."""

    x: Tensor
    labels: Tensor
    prototypes: Tensor
    present: Tensor


def example(x: Tensor | None = None, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Example:
    x = leaf((normal(BATCH, WIDTH) if x is None else x).to(device, dtype))
    prototypes = normal(CLASSES, WIDTH, seed=1).to(device, dtype)
    present = torch.tensor([True, True, False, True], device=device)
    return Example(x, some_labels(len(x)).to(device), prototypes, present)


Loss = Callable[[Example], Tensor]

EVERY_LOSS: dict[str, Loss] = {
    "consistency_kl": lambda e: losses.consistency_kl(e.x, e.x.flip(0)),
    "proximal": lambda e: losses.proximal([e.x], [torch.ones_like(e.x)]),
    "classifier_variance": lambda e: losses.classifier_variance(e.x, threshold=3.0),
    "hyperspherical_energy": lambda e: losses.hyperspherical_energy(e.x),
    "feature_alignment": lambda e: losses.feature_alignment(e.x, e.labels, e.prototypes, present=e.present),
    "prototype_calibration": lambda e: losses.prototype_calibration(e.x, e.labels, e.prototypes, e.present),
    "prototype_contrast": lambda e: prototype_losses.prototype_contrast(
        e.x, e.labels, e.prototypes, classes_of(e), 0.5
    ),
    "alpha-sparsity": lambda e: prototype_losses.prototype_contrast(
        e.x, e.labels, e.prototypes, classes_of(e), 0.5, alpha=0.25
    ),
}
TO_PROTOTYPES = ["prototype_contrast", "alpha-sparsity"]


def classes_of(e: Example) -> Tensor:
    """One prototype for each present class."""
    return torch.arange(len(e.present), device=e.present.device).where(e.present, -1)


@pytest.fixture(params=list(EVERY_LOSS))
def loss(request: pytest.FixtureRequest) -> Loss:
    return EVERY_LOSS[request.param]


# ---------------------------------------------------------------------------------------------- what all share


def test_every_gradient_agrees_with_finite_differences(loss: Loss) -> None:
    e = example()
    assert gradient(lambda x: loss(e._replace(x=x)), e.x).abs().sum() > 1e-3  # there is one to compare
    assert torch.autograd.gradcheck(lambda x: loss(e._replace(x=x)), e.x)


def test_no_loss_looks_at_values_on_the_host(loss: Loss) -> None:
    # Fake tensors have shapes and no values: `.item()`, a boolean mask or `nonzero` raise an error on them.
    real = example()
    with FakeTensorMode() as mode:
        e = Example(*[mode.from_tensor(tensor) for tensor in real])
        value = loss(e)
        (grad,) = torch.autograd.grad(value, e.x)
        assert value.shape == ()
        assert grad.shape == real.x.shape


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-9, 1.0, 1e4])
def test_every_loss_and_gradient_is_finite_at_any_scale(loss: Loss, scale: float) -> None:
    e = example(normal(BATCH, WIDTH, scale=scale), torch.float32)
    value = loss(e)
    value.backward()
    assert value.isfinite()
    assert e.x.grad is not None
    assert e.x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(loss: Loss, dtype: torch.dtype) -> None:
    half = example(dtype=dtype)
    full = half._replace(x=half.x.float(), prototypes=half.prototypes.float())
    assert loss(half).dtype == torch.float32
    assert torch.allclose(loss(half), loss(full), rtol=1e-5)


def test_autocast_does_not_lower_a_loss(loss: Loss) -> None:
    e = example(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = loss(e)
    assert torch.allclose(lowered, loss(e), rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_loss_can_be_captured_in_a_cuda_graph(loss: Loss) -> None:
    e = example(dtype=torch.float32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(e)
        (grad,) = torch.autograd.grad(value, e.x)
        return value.detach(), grad

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    e.x.data.copy_(normal(BATCH, WIDTH, seed=3))  # the graph must read the inputs again
    e.labels.copy_(some_labels(seed=3))
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.allclose(replayed, eager, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- GReg


@quick
@given(seeds, st.floats(0.01, 20))
def test_consistency_is_half_the_sum_of_both_kl_divergences(seed: int, scale: float) -> None:
    a, b = normal(BATCH, CLASSES, seed=seed, scale=scale), normal(BATCH, CLASSES, seed=seed + 1, scale=scale)
    expected = 0.0
    for row_a, row_b in zip(a.numpy(), b.numpy(), strict=True):
        q_a, q_b = softmax(row_a), softmax(row_b)
        forward = sum(q_a[c] * np.log(q_a[c] / q_b[c]) for c in range(CLASSES))
        backward = sum(q_b[c] * np.log(q_b[c] / q_a[c]) for c in range(CLASSES))
        expected += (forward + backward) / 2 / BATCH
    assert losses.consistency_kl(a, b).item() == pytest.approx(expected, rel=1e-9)


@quick
@given(seeds, st.floats(-50, 50))
def test_consistency_of_the_same_prediction_is_zero_whatever_constant_is_added_to_the_logits(
    seed: int, shift: float
) -> None:
    a = normal(BATCH, CLASSES, seed=seed)
    assert losses.consistency_kl(a, a) == 0
    assert losses.consistency_kl(a, a + shift).item() == pytest.approx(0, abs=1e-24)


def test_consistency_resolves_predictions_that_nearly_agree_in_float32() -> None:
    # 1/2 sum (q_a - q_b)(log q_a - log q_b) with a difference of 1e-4: summing both KL terms would lose it.
    a = torch.zeros(1, 2)
    b = torch.tensor([[1e-4, 0.0]])
    q = 1 / (1 + np.exp(-np.float64(np.float32(1e-4))))
    expected = ((q - 0.5) * np.log(q / 0.5) + (0.5 - q) * np.log((1 - q) / 0.5)) / 2
    assert losses.consistency_kl(a, b).item() == pytest.approx(expected, rel=1e-3)


# ------------------------------------------------------------------------------------------------------ FedProx


@quick
@given(seeds)
def test_the_proximal_term_is_half_the_squared_distance_and_its_gradient_points_away_from_the_anchors(
    seed: int,
) -> None:
    shapes = [(3, 2), (4,), (), (2, 1, 3)]
    weights = [leaf(normal(*shape, seed=seed + i)) for i, shape in enumerate(shapes)]
    anchors = [normal(*shape, seed=seed + 10 + i) for i, shape in enumerate(shapes)]
    expected = 0.0
    for w, a in zip(weights, anchors, strict=True):
        for x, x0 in zip(w.flatten().tolist(), a.flatten().tolist(), strict=True):
            expected += 0.5 * (x - x0) ** 2
    term = losses.proximal(iter(weights), iter(anchors))
    assert term.item() == pytest.approx(expected)
    term.backward()
    for w, a in zip(weights, anchors, strict=True):
        assert w.grad is not None
        assert torch.allclose(w.grad, w.detach() - a)  # a step against it moves towards the anchor


def test_the_proximal_term_at_the_anchors_is_zero_with_zero_gradient() -> None:
    w = leaf(torch.ones(3))
    term = losses.proximal([w], [torch.ones(3)])
    term.backward()
    assert term == 0
    assert w.grad is not None
    assert (w.grad == 0).all()


# ----------------------------------------------------------------------------------------------------- UniVarFL


@quick
@given(seeds, st.integers(2, 12), st.floats(0.1, 10), st.sampled_from([None, 0.05, 0.3]))
def test_classifier_variance_is_the_mean_shortfall(seed: int, n: int, scale: float, threshold: float | None) -> None:
    probabilities = normal(n, CLASSES, seed=seed, scale=scale).softmax(1)
    c = 1 / CLASSES if threshold is None else threshold
    expected = 0.0
    for j in range(CLASSES):
        column = probabilities[:, j].tolist()
        mean = sum(column) / n
        expected += max(0.0, c - sum((p - mean) ** 2 for p in column) / (n - 1)) / CLASSES
    value = losses.classifier_variance(probabilities, threshold)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    assert 0 <= value <= c + 1e-12


def test_classifier_variance_of_one_sample_is_the_threshold_with_zero_gradient() -> None:
    one = torch.tensor([[0.7, 0.2, 0.1]])
    assert losses.classifier_variance(one, threshold=0.25) == 0.25
    assert (gradient(losses.classifier_variance, one) == 0).all()


@quick
@given(seeds, st.integers(1, 9), st.sampled_from([1e-3, 1e-2, 1.0]))
def test_the_energy_is_the_mean_over_all_pairs_the_diagonal_included(seed: int, n: int, eps: float) -> None:
    x = normal(n, WIDTH, seed=seed)
    rows = x.numpy()
    expected = sum(1 / (1 - cosine(a, b) + eps) for a in rows for b in rows) / n**2
    assert losses.hyperspherical_energy(x, eps).item() == pytest.approx(expected, rel=1e-9)
    assert 1 / (2 + eps) <= losses.hyperspherical_energy(x, eps) <= 1 / eps * (1 + 1e-9)


def test_a_zero_feature_is_orthogonal_to_all_and_gets_no_gradient() -> None:
    x = normal(3, WIDTH)
    x[1] = 0
    rows = x.numpy()
    expected = sum(1 / (1 - cosine(a, b) + 0.01) for a in rows for b in rows) / 9
    assert losses.hyperspherical_energy(x).item() == pytest.approx(expected)
    grad = gradient(losses.hyperspherical_energy, x)
    assert (grad[1] == 0).all()
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0


@quick
@given(seeds)
def test_the_energy_stays_positive_for_an_eps_below_the_rounding_of_float32(seed: int) -> None:
    x = normal(1, WIDTH, seed=seed).float().expand(4, -1)
    assert losses.hyperspherical_energy(x, eps=1e-9) > 0


# ------------------------------------------------------------------------------------------------------ FedCoda


def alignment_by_loops(x: Tensor, y: Tensor, p: Tensor, tau: float, present: list[bool]) -> float:
    terms = []
    for z, c in zip(x.numpy(), y.tolist(), strict=True):
        if present[c]:
            e = {i: np.exp(cosine(z, p[i].numpy()) / tau) for i in range(len(p)) if present[i]}
            terms.append(-np.log(e[c] / sum(e.values())))
    return float(np.mean(terms)) if terms else 0.0


@quick
@given(seeds, st.sampled_from([0.1, 0.5, 1.0]), st.lists(st.booleans(), min_size=CLASSES, max_size=CLASSES))
def test_alignment_contrasts_the_present_prototypes(seed: int, tau: float, present: list[bool]) -> None:
    x, y, p = normal(BATCH, WIDTH, seed=seed), some_labels(seed=seed), normal(CLASSES, WIDTH, seed=seed + 1)
    expected = alignment_by_loops(x, y, p, tau, present)
    value = losses.feature_alignment(x, y, p, tau, torch.tensor(present))
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert value >= 0


@pytest.mark.parametrize("name", ["feature_alignment", "prototype_calibration", *TO_PROTOTYPES])
@pytest.mark.parametrize("content", [torch.nan, torch.inf, 1e30])
def test_whatever_an_absent_prototype_holds_changes_nothing(name: str, content: float) -> None:
    loss, zeros = EVERY_LOSS[name], example()
    zeros = zeros._replace(labels=zeros.labels % 2, prototypes=zeros.prototypes * zeros.present[:, None])
    rubbish = zeros._replace(prototypes=zeros.prototypes.where(zeros.present[:, None], content))
    assert loss(rubbish) == loss(zeros) != 0
    expected = gradient(lambda x: loss(zeros._replace(x=x)), zeros.x)
    assert torch.equal(gradient(lambda x: loss(rubbish._replace(x=x)), zeros.x), expected)


@pytest.mark.parametrize("name", ["feature_alignment", "prototype_calibration", *TO_PROTOTYPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_any_prototype_and_one_class_in_the_batch_the_loss_is_zero_with_zero_gradient(
    name: str, dtype: torch.dtype
) -> None:
    e = example(dtype=dtype)
    e = e._replace(labels=e.labels * 0, present=e.present & False, prototypes=e.prototypes * torch.nan)
    assert EVERY_LOSS[name](e) == 0
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        assert (gradient(lambda x: EVERY_LOSS[name](e._replace(x=x)), e.x) == 0).all()


def calibration_by_loops(x: Tensor, y: Tensor, p: Tensor, present: list[bool]) -> float:
    directions = []
    for c in range(len(p)):
        members = [z for z, label in zip(x.numpy(), y.tolist(), strict=True) if label == c]
        if members:
            directions.append(sum(members) / len(members))
        elif present[c]:
            directions.append(p[c].numpy())
    if len(directions) < 2:
        return 0.0
    total = 0.0
    for i, a in enumerate(directions):
        others = [np.exp(cosine(a, b)) for j, b in enumerate(directions) if j != i]
        total += np.log(sum(others) / (len(directions) - 1))
    return total / len(directions)


@quick
@given(seeds, st.integers(1, 6), st.lists(st.booleans(), min_size=CLASSES, max_size=CLASSES))
def test_calibration_follows_the_formula_over_the_classes_that_are_known(
    seed: int, batch: int, present: list[bool]
) -> None:
    x, y, p = normal(batch, WIDTH, seed=seed), some_labels(batch, seed=seed), normal(CLASSES, WIDTH, seed=seed + 1)
    value = losses.prototype_calibration(x, y, p, torch.tensor(present))
    assert value.item() == pytest.approx(calibration_by_loops(x, y, p, present), abs=1e-12)


def test_calibration_is_least_for_a_simplex() -> None:
    simplex = torch.eye(CLASSES, dtype=torch.float64) - 1 / CLASSES
    least = losses.prototype_calibration(simplex, torch.arange(CLASSES), simplex)
    assert least.item() == pytest.approx(-1 / (CLASSES - 1))
    for seed in range(20):
        moved = simplex + normal(CLASSES, CLASSES, seed=seed, scale=0.1)
        assert losses.prototype_calibration(moved, torch.arange(CLASSES), simplex) > least


def test_calibration_takes_global_prototypes_as_constants() -> None:
    x, y, p = leaf(normal(2, WIDTH)), torch.tensor([0, 1]), leaf(normal(CLASSES, WIDTH, seed=1))
    losses.prototype_calibration(x, y, p).backward()
    assert p.grad is None
    assert x.grad is not None
    assert (x.grad.abs().sum(1) > 0).all()


# ------------------------------------------------------------------------------------------ FPL, FedPLVM


@quick
@given(seeds, st.sampled_from([0.02, 0.07, 1.0]), st.lists(st.integers(-1, CLASSES - 1), min_size=1, max_size=9))
def test_contrast_sums_over_all_prototypes_of_the_class(seed: int, tau: float, classes: list[int]) -> None:
    x, y, p = normal(BATCH, WIDTH, seed=seed), some_labels(seed=seed), normal(len(classes), WIDTH, seed=seed + 1)
    terms = []
    for z, label in zip(x.numpy(), y.tolist(), strict=True):
        e = [(np.exp(cosine(z, row) / tau), c) for row, c in zip(p.numpy(), classes, strict=True) if c >= 0]
        if label in classes:
            terms.append(-np.log(sum(v for v, c in e if c == label) / sum(v for v, _ in e)))
    value = prototype_losses.prototype_contrast(x, y, p, torch.tensor(classes), tau)
    assert value.item() == pytest.approx(float(np.mean(terms)) if terms else 0.0, rel=1e-9, abs=1e-12)


@quick
@given(seeds, st.floats(0.1, 1.0))
def test_alpha_is_a_power_of_the_similarity(seed: int, alpha: float) -> None:
    x, y, p = normal(BATCH, WIDTH, seed=seed).abs(), some_labels(seed=seed), normal(6, WIDTH, seed=seed + 1).abs()
    classes = [0, 1, 2, 3, 0, 2]
    terms = []
    for z, label in zip(x.numpy(), y.tolist(), strict=True):
        e = [np.exp(cosine(z, row) ** alpha / 0.07) for row in p.numpy()]
        terms.append(-np.log(sum(v for v, c in zip(e, classes, strict=True) if c == label) / sum(e)))
    value = prototype_losses.prototype_contrast(x, y, p, torch.tensor(classes), 0.07, alpha)
    assert value.item() == pytest.approx(float(np.mean(terms)), rel=1e-8)


def test_a_feature_across_or_against_a_prototype_has_a_finite_alpha_sparse_gradient() -> None:
    x, p = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    grad = gradient(
        lambda x: prototype_losses.prototype_contrast(x, torch.tensor([0, 0]), p, torch.arange(2), 0.07, 0.25), x
    )
    assert grad.isfinite().all()
