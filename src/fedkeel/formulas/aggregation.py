"""The papers' server rules, as pure functions of tensors.

Symbols: K clients, C channels, d feature dimensions. Results have the dtype of the inputs, whatever the precision
inside.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.core.state import Tensors, clone, is_continuous
from fedkeel.errors import FedkeelError
from fedkeel.formulas.similarity import precise

Rows = TypeVar("Rows", Tensor, NDArray[Any])


def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Tensors:
    """Mean of the clients' named tensors, each weighted by its share of the weights' sum; of integers (counters such as
    `num_batches_tracked`) and truth values the maximum.

        x = sum_k (w_k / W) x_k,    W = sum_k w_k

    Computed as x_1 + sum_k w_k / W (x_k - x_1): the mean of identical clients is that client, bit for bit. Half
    precision, which would lose the small differences between clients, is accumulated in float32. No state at all raises
    `ValueError`.

    Reference: FedAvg (McMahan et al., AISTATS 2017), Alg. 1; HBN, Eq. 3; FedCoda, Eq. 2.

    >>> weighted_mean([{"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([4.0, 1.0])}], weights=[30, 10])
    {'w': tensor([1., 1.])}
    """
    if not states:
        raise ValueError("The mean of no states is not defined: give at least one.")
    total = float(sum(weights))
    first = states[0]
    result = clone({name: precise(tensor) if is_continuous(tensor) else tensor for name, tensor in first.items()})
    floating = [name for name, tensor in first.items() if is_continuous(tensor)]
    if floating:
        origin, accumulated = [precise(first[name]) for name in floating], [result[name] for name in floating]
        for weight, state in zip(weights[1:], states[1:], strict=True):
            differences = torch._foreach_sub([precise(state[name]) for name in floating], origin)
            torch._foreach_add_(accumulated, differences, alpha=weight / total)
    for name in first.keys() - set(floating):
        result[name] = torch.stack([state[name] for state in states]).amax(0)
    return {name: tensor.to(first[name].dtype) for name, tensor in result.items()}


def pooled_moments(
    means: Tensor | Sequence[Tensor], variances: Tensor | Sequence[Tensor], counts: Tensor | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of the clients' data, from each client's own.

        mu_g = sum_k (N_k / N) mu_k,    sigma_g^2 = sum_k N_k (sigma_k^2 + (mu_k - mu_g)^2) / (N - 1)

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
    mu, var = (each if isinstance(each, Tensor) else torch.stack(list(each)) for each in (means, variances))
    n = torch.as_tensor(counts, dtype=torch.float64, device=mu.device)
    total = float(n.sum())
    if not len(mu) == len(var) == len(n) or not bool((n >= 0).all()) or not 0 < total < math.inf:
        raise FedkeelError(
            f"Pooled moments of {len(mu)} means, {len(var)} variances and the counts {n.tolist()}: give for each of "
            "the clients how many values its moments are of, not negative and not all 0."
        )
    dtype = mu.dtype
    counted = n > 0
    n, mu, var = n[counted], mu.detach()[counted].double(), var.detach()[counted].double()
    n = n.reshape(-1, *[1] * (mu.dim() - 1))
    mean = mu[0] + (n / total * (mu - mu[0])).sum(dim=0)  # from the first: exact when all means are the same
    variance = (n * (var + (mu - mean).square())).sum(dim=0) / max(total - 1, 1)
    return mean.to(dtype), variance.clamp_min(0).to(dtype)


def moving_average(old: Mapping[str, Tensor], new: Mapping[str, Tensor], momentum: float) -> Tensors:
    """Exponential moving average of named tensors; integers take the new value.

        (1 - m) old + m new

    Equal inputs come back bit-equal, and the result lies between the two. `momentum` is m: 0 keeps the old, 1 takes
    the new.

    Reference: HBN, Eq. 11; GReg, Alg. 2.

    >>> moving_average({"mu": torch.tensor([1.0, 4.0])}, {"mu": torch.tensor([2.0, 4.0])}, momentum=0.25)
    {'mu': tensor([1.2500, 4.0000])}
    """
    return {
        name: torch.lerp(old[name].to(tensor.dtype), tensor, momentum) if is_continuous(tensor) else tensor
        for name, tensor in new.items()
    }


# -- prototypes of one class -----------------------------------------------------------------------------------------
def mean_prototype(prototypes: Tensor) -> Tensor:
    """The mean of the clients' prototypes, (K, d) -> (d,), every client alike.

        pbar = 1/K sum_k p_k

    Without weights on purpose: weighing by the number of samples would give away the clients' class counts.

    Reference: FedCoda, Eq. 5.

    >>> mean_prototype(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    tensor([1., 2.])
    """
    rows = prototypes.detach().double()
    return (rows[0] + (rows - rows[0]).mean(dim=0)).to(prototypes.dtype)  # from the first: exact when all are the same


def prototype_start(prototypes: Tensor) -> Tensor:
    """The mean of the clients' prototypes, (K, d) -> (d,), weighted by how far each is from their plain mean.

        ptilde = sum_k (d_k / sum_i d_i) p_k,    d_k = ||p_k - pbar||

    So a domain that few clients share counts for more. All prototypes the same: that prototype.

    Reference: FedCoda, Eq. 25.

    >>> prototype_start(torch.tensor([[0.0], [0.0], [0.0], [4.0]]))  # pbar = 1, distances 1, 1, 1, 3
    tensor([2.])
    """
    rows = prototypes.detach().double()
    mean = mean_prototype(rows)
    d = (rows - mean).norm(dim=1)
    # The weights sum to 1, so this is Eq. 25; where every distance is 0 it is the mean.
    start: Tensor = mean + d @ (rows - mean) / d.sum().clamp_min(torch.finfo(rows.dtype).tiny)
    return start.to(prototypes.dtype)


def fair_prototype(prototypes: Rows) -> Rows:
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
    p, origin = prototypes.detach().double().cpu(), start.double().cpu()
    unit = float((p - origin).norm(dim=1).mean())
    if len(p) <= 2 or not 0 < unit < math.inf:
        return start
    rows = ((p - origin) / unit).numpy()

    def objective(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        towards = point - rows
        d = np.linalg.norm(towards, axis=1)
        excess = d - d.mean()
        shares = np.divide(excess, d, out=np.zeros_like(d), where=d > 0)  # at a prototype itself: no direction
        return float(np.mean(excess**2)), 2 / len(rows) * (shares @ towards)

    def unfairness(point: Tensor) -> float:
        return float((p - point.double().cpu()).norm(dim=1).var(correction=0))

    found = minimize(objective, np.zeros(rows.shape[1]), jac=True, method="L-BFGS-B").x
    fair = (origin + unit * torch.from_numpy(found)).to(prototypes)
    return fair if unfairness(fair) < unfairness(start) else start
