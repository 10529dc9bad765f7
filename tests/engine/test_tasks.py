from __future__ import annotations

import torch

from fedkeel.engine.tasks import fingerprint


def test_a_fingerprint_tells_names_shapes_kinds_and_bits_apart() -> None:
    plain = {"a": torch.zeros(2, 3)}
    others = [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.zeros(2, 3).index_fill(0, torch.tensor([1]), 1e-30)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(())},
        {},
    ]
    assert len({fingerprint(tensors) for tensors in [plain, *others]}) == 7
    assert fingerprint(plain) == fingerprint({"a": torch.zeros(3, 2).T})
