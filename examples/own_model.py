"""A network of your own: any nn.Module, with the name of its last layer.

python examples/own_model.py
"""

from __future__ import annotations

from torch import Tensor, nn

import fedkeel


class Tiny(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.last = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.body(x))
        return logits


if __name__ == "__main__":
    model = fedkeel.models.wrap(Tiny(10), head="last")
    run = fedkeel.simulate(model=model, method="fedprox(mu=0.01)", rounds=3, learning_rate=0.05, momentum=0.9)
    print(run)
