"""The papers' loss terms, as pure functions of tensors.

Symbols: B samples in a batch (n in UniVarFL), C classes (D in GReg and UniVarFL), d feature dimensions.

A loss asks the host nothing: no `.item()`, no shape that depends on values. So a training step that contains it
can be captured in a CUDA graph. Half-precision inputs are computed in float32, also under autocast: in bfloat16,
1 - cos is off by up to 0.004, as much as the `eps` that it is added to.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeel.formulas.similarity import cosines, precise, product


def consistency_kl(logits_a: Tensor, logits_b: Tensor) -> Tensor:
    """Symmetrised KL divergence between two predictions, mean over the batch.

        l_reg = 1/2 KL(q_a || q_b) + 1/2 KL(q_b || q_a) = 1/2 sum_c (q_a^c - q_b^c)(log q_a^c - log q_b^c)

    with q = softmax(logits). The second form is the first one rearranged: no term of it is negative and none
    cancels another, so it stays exact when the predictions nearly agree. Gradients flow through both.

    Args:
        logits_a, logits_b: (B, C), of the same samples, e.g. under batch and under global statistics.

    Returns:
        Scalar, at least 0, and 0 where the predictions are the same.

    Reference: GReg, Eq. 5.

    >>> likely = torch.tensor([[0.8, 0.2]]).log()
    >>> unlikely = torch.tensor([[0.2, 0.8]]).log()
    >>> round(consistency_kl(likely, unlikely).item(), 4)  # 0.6 log 4
    0.8318
    """
    log_a, log_b = F.log_softmax(precise(logits_a), dim=-1), F.log_softmax(precise(logits_b), dim=-1)
    return (((log_a.exp() - log_b.exp()) * (log_a - log_b)).sum(dim=-1) / 2).mean()


def proximal(weights: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    """Half the squared distance between weights and the anchors they should stay near.

        1/2 ||w - w_0||^2,    whose gradient is w - w_0

    FedProx adds mu times this. A few kernels for all tensors together, however many there are.

    Args:
        weights: tensors of any shapes.
        anchors: as many tensors of the same shapes, in the same order.

    Returns:
        Scalar, at least 0.

    Reference: FedProx (Li et al., MLSys 2020), Eq. 2.

    >>> w, w0 = torch.tensor([3.0, 4.0], requires_grad=True), torch.zeros(2)
    >>> term = proximal([w], [w0])
    >>> term.backward()
    >>> term.item(), w.grad.tolist()
    (12.5, [3.0, 4.0])
    """
    weights, anchors = list(weights), list(anchors)
    if not weights:
        return torch.zeros(())
    differences = torch._foreach_sub([precise(w) for w in weights], [precise(a) for a in anchors])
    return torch.stack(torch._foreach_norm(differences)).square().sum() / 2


def classifier_variance(probabilities: Tensor, threshold: float | None = None) -> Tensor:
    """How far the variance of each class's probability over the batch falls short of a threshold.

        L_V = 1/D sum_j max(0, c - Var_i(f(x_i)_j)),    c = 1/D sum_j Var(A_j)

    The variance is the unbiased one (n - 1), both in the batch and for the threshold c. A is the D x D identity
    matrix: the probabilities of a batch with one perfectly predicted sample of each class. Its columns have one 1
    and D - 1 zeros, so mean 1/D, squared deviations that sum to 1 - 1/D, and variance (1 - 1/D) / (D - 1) = 1/D.

    A batch of one sample has no unbiased variance; it counts as 0, so the loss is c and its gradient 0.

    Args:
        probabilities: (n, D), softmax outputs.
        threshold: c; None for 1/D.

    Returns:
        Scalar, in [0, c].

    Reference: UniVarFL, Eqs. 1-2.

    >>> classifier_variance(torch.eye(4)).item()  # one sample of each class, perfectly predicted
    0.0
    >>> classifier_variance(torch.full((8, 4), 0.25)).item()  # the same prediction for every sample
    0.25
    """
    n, classes = probabilities.shape
    c = 1 / classes if threshold is None else threshold
    probabilities = precise(probabilities)
    deviations = probabilities - probabilities.mean(dim=0)
    variance = deviations.square().sum(dim=0) / max(n - 1, 1)
    return (c - variance).clamp_min(0).mean()


def hyperspherical_energy(features: Tensor, eps: float = 1e-2) -> Tensor:
    """How crowded the directions of the features are.

        L_HE = 1/n^2 sum_i sum_j 1 / (1 - z_i . z_j + eps),    z_i = x_i / ||x_i||

    All pairs count, those of a feature with itself included: they add the constant 1 / (n eps), without gradient.
    A zero vector has no direction; its cosine with everything is 0, and its gradient is 0.

    Args:
        features: (n, d); normalised here.
        eps: keeps the energy of equal directions finite, at 1 / eps. The paper gives no value.

    Returns:
        Scalar, between 1 / (2 + eps) and 1 / eps.

    Reference: UniVarFL, Eq. 3.

    >>> round(hyperspherical_energy(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), eps=0.5).item(), 4)  # the same direction
    2.0
    >>> round(hyperspherical_energy(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]), eps=0.5).item(), 4)  # opposite ones
    1.2
    """
    # Rounding can leave a cosine just above 1, which a small eps would turn into a negative energy.
    cosine = cosines(features, features).clamp(max=1)
    return (1 - cosine + eps).reciprocal().mean()


def feature_alignment(
    features: Tensor, labels: Tensor, prototypes: Tensor, temperature: float = 0.1, present: Tensor | None = None
) -> Tensor:
    """Contrast of each feature's similarity to its class's global prototype with that to the others, batch mean.

        L_FA = -log( exp(sim(z, p_y) / tau) / sum_c exp(sim(z, p_c) / tau) ),    sim: cosine similarity

    Classes without a prototype are left out of the sum over c, and samples of such a class out of the mean; the
    loss is 0 when no sample is left. The similarity to a zero vector is 0.

    Args:
        features: (B, d).
        labels: (B,), int64.
        prototypes: (C, d). Rows of absent classes may hold anything, NaN included.
        temperature: tau.
        present: (C,), bool, the classes that have a global prototype; None when all have.

    Returns:
        Scalar, at least 0.

    Reference: FedCoda, Eq. 23.

    >>> prototypes = torch.eye(2)
    >>> loss = feature_alignment(torch.tensor([[5.0, 0.0]]), torch.tensor([0]), prototypes, temperature=1.0)
    >>> round(loss.item(), 4)  # log(1 + 1/e)
    0.3133
    >>> feature_alignment(torch.ones(1, 2), torch.tensor([1]), prototypes, present=torch.tensor([True, False])).item()
    0.0
    """
    if present is None:
        present = torch.ones(len(prototypes), dtype=torch.bool, device=prototypes.device)
    similarity = cosines(features, prototypes.where(present[:, None], 0)) / temperature
    # The lowest finite number instead of -inf: where no class is present at all, nothing turns into NaN.
    similarity = similarity.masked_fill(~present, torch.finfo(similarity.dtype).min)
    loss = F.cross_entropy(similarity, labels, reduction="none")
    counts = present.index_select(0, labels)
    return loss.where(counts, 0).sum() / counts.sum().clamp_min(1)


def prototype_calibration(
    features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor | None = None
) -> Tensor:
    """How close together the class means of a batch point.

        zbar_c = 1/B_c sum_i 1[y_i = c] z_i,    zhat_c = zbar_c / ||zbar_c||                    (Eq. 21)
        L_PC = 1/C sum_i log( 1/(C-1) sum_{j != i} exp(zhat_i . zhat_j) )                       (Eq. 22)

    A class absent from the batch takes its global prototype, as a constant. A class that is in neither is left
    out of the sums and of C; with fewer than two classes the loss is 0.

    Args:
        features: (B, d).
        labels: (B,), int64.
        prototypes: (C, d). Rows of absent classes may hold anything, NaN included.
        present: (C,), bool, the classes that have a global prototype; None when all have.

    Returns:
        Scalar, in [-1, 1]; the least it can be is -1/(C-1), when the directions form a simplex.

    Reference: FedCoda, Eqs. 21-22.

    >>> features, labels = torch.tensor([[2.0, 1.0], [2.0, -1.0], [-3.0, 0.0]]), torch.tensor([0, 0, 1])
    >>> round(prototype_calibration(features, labels, torch.zeros(2, 2)).item(), 4)  # two opposite classes
    -1.0
    """
    classes = len(prototypes)
    if present is None:
        present = torch.ones(classes, dtype=torch.bool, device=prototypes.device)
    features = precise(features)
    membership = (labels == torch.arange(classes, device=labels.device)[:, None]).to(features.dtype)  # (C, B)
    sizes = membership.sum(dim=1)
    in_batch = sizes > 0
    means = product(membership, features) / sizes.clamp_min(1)[:, None]

    known = in_batch | present
    directions = means.where(in_batch[:, None], prototypes.detach().to(means.dtype)).where(known[:, None], 0)
    pairs = known & known[:, None] & ~torch.eye(classes, dtype=torch.bool, device=known.device)
    # Cosines lie in [-1, 1]: the exponentials need no shift, and a row without pairs is the only one that sums to 0.
    total = cosines(directions, directions).exp().where(pairs, 0).sum(dim=1)
    others = pairs.sum(dim=1)
    row = (total.where(others > 0, 1) / others.clamp_min(1)).log()
    return row.sum() / known.sum().clamp_min(1)
