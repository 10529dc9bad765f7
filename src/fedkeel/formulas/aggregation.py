"""The papers' server rules, as pure functions of tensors.

| function | paper | rule |
|---|---|---|
| `weighted_mean` | FedAvg (McMahan et al., 2017), Alg. 1 | weights by number of samples; counters by their maximum |
| `pooled_moments` | HBN, Eq. 8 | mean and variance of the union of the clients' data |
| `moving_average` | HBN, Eq. 11; GReg, Alg. 2 | new statistics blended into the old |
| `mean_prototype` | FedCoda, Eq. 5 | a class's prototypes averaged |
| `prototype_start`, `fair_prototype` | FedCoda, Eqs. 25-26 | a point equally far from every client's prototype |
| `distance_variance` | FedCoda, Eq. 26 | how unequal those distances are |

Symbols: K clients, C channels, d feature dimensions. Results have the dtype of the inputs, whatever the precision
inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.errors import FedkeelError


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Mean of the clients' tensors, each weighted by its share of the weights' sum.

        x = sum_k w_k / W x_k,    W = sum_k w_k

    Computed as a running mean, m_k = m_{k-1} + w_k / W_k (x_k - m_{k-1}) with W_k = w_1 + ... + w_k. So it is
    bit-equal to the input when all inputs are the same, and every entry lies between the least and the greatest
    of the inputs: the mean of variances is not negative by rounding. Half precision is accumulated in float32.

    Integers (counters such as `num_batches_tracked`) and booleans have no mean; they take their maximum.

    Args:
        tensors: K tensors of one shape and dtype.
        weights: K numbers, not negative, not all 0, e.g. numbers of samples.

    Returns:
        A new tensor of the same shape and dtype.

    Reference: FedAvg (McMahan et al., AISTATS 2017), Alg. 1.

    >>> weighted_mean([torch.tensor([0.0, 1.0]), torch.tensor([4.0, 1.0])], weights=[30, 10])
    tensor([1., 1.])
    >>> weighted_mean([torch.tensor(7), torch.tensor(9)], weights=[30, 10])
    tensor(9)
    """
    if not tensors or len(tensors) != len(weights):
        raise FedkeelError(
            f"A mean of {len(tensors)} tensors with {len(weights)} weights: give at least one tensor, and one "
            "weight for each."
        )
    if any(x.shape != tensors[0].shape or x.dtype != tensors[0].dtype for x in tensors):
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        raise FedkeelError(f"A mean needs tensors of one shape and dtype, these differ: {given}.")
    total = math.fsum(weights)
    if not all(w >= 0 for w in weights) or not 0 < total < math.inf:
        raise FedkeelError(
            f"The weights of a mean must be finite, not negative and not all 0, got {list(weights)}: give the "
            "clients' numbers of samples."
        )
    first = tensors[0].detach()
    if not (first.is_floating_point() or first.is_complex()):
        return torch.stack([x.detach() for x in tensors]).amax(dim=0)

    counted = [(x.detach(), w) for x, w in zip(tensors, weights, strict=True) if w > 0]
    inside = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
    mean = counted[0][0].to(inside, copy=True)
    so_far = counted[0][1]
    for x, w in counted[1:]:
        so_far += w
        mean.lerp_(x.to(inside), w / so_far)
    return mean.to(first.dtype)


def pooled_moments(
    means: Tensor | Sequence[Tensor], variances: Tensor | Sequence[Tensor], counts: Tensor | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of the clients' data, from each client's own.

        mu_g = sum_k N_k / N mu_k,    sigma_g^2 = sum_k N_k (sigma_k^2 + (mu_k - mu_g)^2) / (N - 1)

    with N = sum_k N_k and the clients' sigma_k^2 biased (divided by N_k). Then sigma_g^2 is the unbiased variance
    of all data together; a plain mean of the clients' variances would miss how far apart their means are.

    Up to N = 2 the sum is divided by 1: a single sample (N = 1) gets the variance that its client reported, 0 if
    it is the sample's own, and shares that sum to 1 instead of counts give the biased variance of the union.
    Computed in float64.

    Args:
        means: (K, C), or K tensors (C,). Any other shape of a tensor will do as well.
        variances: the same shape; biased.
        counts: (K,), not negative, not all 0: how many values each client's moments are of. A client with count
            0 has no say.

    Returns:
        mean and variance, (C,) each, in the dtype of the inputs. The variance is never negative.

    Reference: HBN, Eq. 8 and appendix A.2.

    >>> halves = torch.tensor([0.0, 2.0, 7.0]), torch.tensor([5.0])
    >>> means, variances = [x.mean() for x in halves], [x.var(correction=0) for x in halves]
    >>> mean, variance = pooled_moments(means, variances, counts=[3, 1])
    >>> whole = torch.cat(halves)
    >>> torch.allclose(mean, whole.mean()), torch.allclose(variance, whole.var())
    (True, True)
    """
    mu, var = _stacked(means), _stacked(variances)
    n = torch.as_tensor(counts, dtype=torch.float64, device=mu.device)
    if mu.shape != var.shape or mu.dtype != var.dtype or n.shape != mu.shape[:1]:
        raise FedkeelError(
            f"Pooled moments need means and variances of one shape and dtype and one count for each client, got "
            f"{tuple(mu.shape)} {mu.dtype}, {tuple(var.shape)} {var.dtype} and {tuple(n.shape)} counts."
        )
    total = float(n.sum())
    if not bool((n >= 0).all()) or not 0 < total < math.inf:
        raise FedkeelError(
            f"Counts of pooled moments must be finite, not negative and not all 0, got {n.tolist()}: give the number "
            "of values that each client's moments are of."
        )
    dtype = mu.dtype
    counted = n > 0
    n, mu, var = n[counted], mu[counted].double(), var[counted].double()
    n = n.reshape(-1, *[1] * (mu.dim() - 1))
    mean = mu[0] + (n / total * (mu - mu[0])).sum(dim=0)  # from the first: exact when all means are the same
    variance = (n * (var + (mu - mean).square())).sum(dim=0) / max(total - 1, 1)
    return mean.to(dtype), variance.clamp_min(0).to(dtype)


def moving_average(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Exponential moving average: the new value gets `momentum`.

        (1 - m) old + m new

    Equal inputs come back bit-equal, and the result lies between the two.

    Args:
        old, new: tensors of one shape.
        momentum: m, in [0, 1]: 0 keeps the old, 1 takes the new.

    Returns:
        A new tensor, in the dtype of `old`.

    Reference: HBN, Eq. 11; GReg, Alg. 2.

    >>> moving_average(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0]), momentum=0.25)
    tensor([1.2500, 4.0000])
    """
    if not 0 <= momentum <= 1:
        raise FedkeelError(f"The momentum of a moving average must lie between 0 and 1, got {momentum}.")
    if old.shape != new.shape:
        raise FedkeelError(f"A moving average needs one shape, got {tuple(old.shape)} and {tuple(new.shape)}.")
    inside = torch.promote_types(old.dtype, torch.float32)
    return torch.lerp(old.to(inside), new.to(inside), momentum).to(old.dtype)


def mean_prototype(prototypes: Tensor) -> Tensor:
    """The mean of the clients' prototypes of one class, every client alike.

        pbar = 1/K sum_k p_k

    Without weights on purpose: weighing by the number of samples would give away the clients' class counts.

    Args:
        prototypes: (K, d), one row from each client that has the class.

    Returns:
        (d,)

    Reference: FedCoda, Eq. 5.

    >>> mean_prototype(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    tensor([1., 2.])
    """
    return _mean(_checked(prototypes)).to(prototypes.dtype)


def prototype_start(prototypes: Tensor) -> Tensor:
    """The mean of the clients' prototypes, weighted by how far each is from their plain mean.

        ptilde = sum_k d_k / (sum_i d_i) p_k,    d_k = ||p_k - pbar||

    So a domain that few clients share counts for more. All prototypes the same: that prototype.

    Args:
        prototypes: (K, d), one row from each client that has the class.

    Returns:
        (d,)

    Reference: FedCoda, Eq. 25.

    >>> prototype_start(torch.tensor([[0.0], [0.0], [0.0], [4.0]]))  # pbar = 1, distances 1, 1, 1, 3
    tensor([2.])
    """
    p = _checked(prototypes)
    mean = _mean(p)
    d = _lengths(p - mean)
    # The weights sum to 1, so this is Eq. 25; where every distance is 0 it is the mean.
    start = mean + d @ (p - mean) / d.sum().clamp_min(torch.finfo(p.dtype).tiny)
    return start.to(prototypes.dtype)


def distance_variance(point: Tensor, prototypes: Tensor) -> Tensor:
    """How unequal the distances from a point to the clients' prototypes are.

        1/K sum_k (d_k - 1/K sum_i d_i)^2,    d_k = ||p_k - point||

    Args:
        point: (d,)
        prototypes: (K, d)

    Returns:
        Scalar in float64, at least 0.

    Reference: FedCoda, Eq. 26, the objective.

    >>> distance_variance(torch.tensor([0.0, 0.0]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])).item()  # distances 5, 1
    4.0
    """
    d = _lengths(_checked(prototypes) - point.double())
    return (d - d.mean()).square().mean()


@overload
def fair_prototype(prototypes: Tensor) -> Tensor: ...
@overload
def fair_prototype(prototypes: NDArray[Any]) -> NDArray[Any]: ...
def fair_prototype(prototypes: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    """The point whose distances to the clients' prototypes of one class differ least.

        argmin_p 1/K sum_k (d_k - 1/K sum_i d_i)^2,    d_k = ||p_k - p||

    by L-BFGS-B from `prototype_start`, in float64 with the exact gradient 2/K sum_k (d_k - dbar) (p - p_k) / d_k.
    The search is in units of the prototypes' own spread, with SciPy's tolerances: scaling or moving all prototypes
    scales or moves the result. It is a local minimum, and never worse than the start.

    One prototype is its own fair prototype, two have their midpoint. Where the prototypes almost lie on a line or a
    plane, the equidistant point can lie far outside of them, as the centre of a flat triangle's circle does.

    Args:
        prototypes: (K, d), one row from each client that has the class; torch or NumPy.

    Returns:
        (d,), of the same kind, dtype and device.

    Reference: FedCoda, Eqs. 25-26.

    >>> crowd = [[-1.0, 0.0]] * 9
    >>> fair_prototype(torch.tensor([*crowd, [1.0, 0.0]])).abs().round(decimals=3)  # the mean is at -0.8
    tensor([0., 0.])
    """
    from scipy.optimize import minimize  # here, so that `import fedkeel` stays quick

    if isinstance(prototypes, np.ndarray):
        return fair_prototype(torch.from_numpy(np.ascontiguousarray(prototypes))).numpy()
    start = prototype_start(prototypes)
    p, origin = _checked(prototypes).cpu(), start.double().cpu()
    unit = float(_lengths(p - origin).mean())
    if len(p) <= 2 or not 0 < unit < math.inf:
        return start
    rows = ((p - origin) / unit).numpy()

    def objective(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        towards = point - rows
        d = np.linalg.norm(towards, axis=1)
        excess = d - d.mean()
        shares = np.divide(excess, d, out=np.zeros_like(d), where=d > 0)  # at a prototype itself: no direction
        return float(np.mean(excess**2)), 2 / len(rows) * (shares @ towards)

    found = minimize(objective, np.zeros(rows.shape[1]), jac=True, method="L-BFGS-B").x
    fair = (origin + unit * torch.from_numpy(found)).to(prototypes)
    return fair if distance_variance(fair, prototypes) < distance_variance(start, prototypes) else start


def _checked(prototypes: Tensor) -> Tensor:
    """Prototypes of one class in float64, after a look at their shape."""
    if prototypes.dim() != 2 or len(prototypes) == 0 or not prototypes.is_floating_point():
        raise FedkeelError(
            f"Prototypes of a class must be floating-point rows (K, d) from at least one client, got shape "
            f"{tuple(prototypes.shape)} of {prototypes.dtype}: leave out classes that no client has."
        )
    return prototypes.detach().double()


def _mean(rows: Tensor) -> Tensor:
    """Mean of the rows, from the first: exact when all are the same."""
    return rows[0] + (rows - rows[0]).mean(dim=0)


def _lengths(rows: Tensor) -> Tensor:
    """Euclidean length of each row: (K, d) -> (K,)."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths


def _stacked(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """K tensors, one for each client, as one tensor (K, ...)."""
    if not isinstance(tensors, Tensor):
        if len(tensors) == 0:
            raise FedkeelError("Pooled moments of no client at all: give those of at least one.")
        tensors = torch.stack(list(tensors))
    return tensors.detach()
