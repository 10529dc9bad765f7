from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from fedkeel.core.method import Method
from fedkeel.methods import build
from tests import tiny


def test_it_is_the_empty_method() -> None:
    hooks = [name for name in vars(Method) if not name.startswith("_") and callable(getattr(Method, name))]
    assert not any(build("fedavg").overrides(hook) for hook in hooks if hook != "overrides")


def test_with_one_client_it_is_plain_sgd(tmp_path: Path) -> None:
    on = tiny.federation({"ward": 12}, augment="")
    run = tiny.run(tmp_path / "r", on=on, rounds=3, batch_size=12, learning_rate=0.2)
    model, ward = tiny.model().train(), on["ward"]
    x, y = on.images[ward.train] / 255, on.labels[ward.train]
    for _ in range(3):
        model.zero_grad()
        logits = model(x).logits
        (torch.logsumexp(logits, 1) - logits[torch.arange(12), y]).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad
    stored = safetensors.torch.load_file(run.directory / "model.safetensors")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(stored[name], tensor, rtol=1e-4, atol=1e-6)
