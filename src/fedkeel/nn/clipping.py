"""Gradient clipping of the papers, in place and without waiting for the device.

`agc_` is the adaptive gradient clipping of FedWon (appendix Eq. 4, after Brock et al., 2021); `HistoryClip` that of
FedCoda (Eq. 10).
"""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def agc_(parameters: Iterable[Tensor], clipping: float, eps: float = 1e-3) -> None:
    """Scale the gradient G_i of each output unit i down to `clipping` * max(||W_i||, eps) where it is longer.

    A unit is a row of a matrix, a filter of a convolution, and the whole of a one-dimensional parameter.

    Args:
        parameters: whose `.grad` is scaled in place; those without one are left alone.
        clipping: lambda of the paper, above 0.
        eps: the least norm that a unit's weights are taken to have.

    Reference: FedWon, appendix Eq. 4 (Brock et al., ICML 2021).

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[6.0, 8.0]])  # twice as long as the weight
    >>> agc_([weight], clipping=0.5)
    >>> weight.grad
    tensor([[1.5000, 2.0000]])
    """
    pairs = [(p.detach(), p.grad) for p in parameters if p.grad is not None]
    if not pairs:
        return
    limits = [_unit_norm(weight) for weight, _ in pairs]
    torch._foreach_clamp_min_(limits, eps)
    torch._foreach_mul_(limits, clipping)
    gradients = [gradient for _, gradient in pairs]
    lengths = [_unit_norm(gradient) for gradient in gradients]
    # limit / max(length, limit) is 1 up to the limit, and never divides by zero
    torch._foreach_maximum_(lengths, limits)
    torch._foreach_div_(limits, lengths)
    torch._foreach_mul_(gradients, limits)


def _unit_norm(tensor: Tensor) -> Tensor:
    """Norm over all but the first dimension, kept for broadcasting; over everything for vectors and scalars."""
    axes = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=axes, keepdim=tensor.ndim > 1)
    return norm


class HistoryClip:
    """Clip each parameter's gradient against the history of its own norms (FedCoda Eq. 10).

    g <- g min(alpha gamma / ||g||, 1) with gamma of the step before, then gamma <- beta gamma + (1 - beta) ||g||, where
    ||g|| is the norm before clipping. Without history the first norm is the start, so a first step is never clipped.
    A norm of zero starts no history, and one that is not finite does not enter it.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> clip = HistoryClip([weight], alpha=1.5)
    >>> for gradient in ([3.0, 4.0], [30.0, 40.0]):  # norms 5 and 50, of which 1.5 * 5 are left
    ...     weight.grad = torch.tensor(gradient)
    ...     clip.step()
    >>> weight.grad
    tensor([4.5000, 6.0000])
    """

    def __init__(self, parameters: Iterable[Tensor], alpha: float = 1.5, beta: float = 0.99) -> None:
        self.parameters = list(parameters)
        self.alpha, self.beta = alpha, beta
        # gamma of every parameter in one tensor that stays where it is (a captured graph writes to it); 0: no history
        self.history = torch.zeros(len(self.parameters), device=self.parameters[0].device)

    @torch.no_grad()
    def step(self, *, clip: bool = True) -> None:
        """Clip the gradients in place and add their norms to the history; `clip=False` does the latter only."""
        present = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not present:
            return
        gradients = [grad for i in present if (grad := self.parameters[i].grad) is not None]
        # A parameter without gradient takes its own history as norm, which leaves the history as it is.
        lengths = list(self.history.unbind())
        for i, length in zip(present, torch._foreach_norm(gradients), strict=True):
            lengths[i] = length.to(self.history.dtype)
        norms = torch.stack(lengths)
        known = self.history > 0
        if clip:
            limits = torch.where(known, self.alpha * self.history, norms)
            factors = (limits / torch.maximum(norms, limits)).nan_to_num(nan=1.0).unbind()
            torch._foreach_mul_(gradients, [factors[i].to(g.dtype) for i, g in zip(present, gradients, strict=True)])
        norms = torch.where(norms.isfinite(), norms, self.history)
        self.history.copy_(torch.where(known, torch.lerp(norms, self.history, self.beta), norms))
