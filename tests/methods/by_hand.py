"""Local training by hand, in float64: full batches of a client of `small_federation`, plain loops, no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.core.state import Tensors
from tests.methods.small import pixels, small_federation, small_model

SIZES = {"client0": 24, "client1": 16, "client2": 32}
FULL = {"batch_size": 64, "learning_rate": 0.1, "momentum": 0.9}  # each client's data are one batch


def initial() -> Tensors:
    return {name: p.detach().clone() for name, p in small_model().double().named_parameters()}


def trained(
    client: str,
    start: Tensors,
    steps: int,
    term: Callable[[Tensors], Tensor | float] = lambda _: 0.0,
    moves: Callable[[int, str], bool] = lambda *_: True,
) -> Tensors:
    """The weights after so many steps of SGD with momentum on cross-entropy and a term, of those that move."""
    model, federation = small_model().double().train(), small_federation()
    model.load_state_dict({**model.state_dict(), **start})
    x, y = pixels(federation, client).double(), federation.labels[federation[client].train]
    weights = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in weights.items()}
    for step in range(steps):
        model.zero_grad()
        (F.cross_entropy(model(x).logits, y) + term(weights)).backward()
        with torch.no_grad():
            for name, p in weights.items():
                if moves(step, name):
                    velocity[name] = FULL["momentum"] * velocity[name] + p.grad
                    p -= FULL["learning_rate"] * velocity[name]
    return {name: p.detach().clone() for name, p in weights.items()}


def mean(states: Sequence[Tensors], counts: Sequence[float]) -> Tensors:
    return {name: sum(c * s[name] for s, c in zip(states, counts, strict=True)) / sum(counts) for name in states[0]}


def assert_near(given: Tensors, wanted: Tensors, names: Sequence[str] = ()) -> None:
    for name in names or wanted:
        torch.testing.assert_close(given[name].double(), wanted[name], rtol=1e-3, atol=2e-5, msg=name)
