"""A method of your own, in one file: local gradients are shrunk for clients that have few samples.

python examples/own_method.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import fedkeel
from fedkeel.core.client import LocalClient
from fedkeel.options import NotNegative


@fedkeel.register("cautious")
@dataclass
class Cautious(fedkeel.Method):
    """Small clients take small steps: gradients are scaled by n / (n + half)."""

    paper = "an example"

    half: NotNegative = 100.0  # samples at which a gradient counts half

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        share = client.samples / (client.samples + self.half)
        for parameter in client.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(share)


if __name__ == "__main__":
    run = fedkeel.simulate(method="cautious(half=50)+gn", rounds=3, learning_rate=0.05, momentum=0.9)
    print(run)
    print({domain: f"{accuracy:.1%}" for domain, accuracy in run.domains.items()})
