"""`--compile`: the same training, by compiled code where the compiler can, without it where it cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny


def weights(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    run = tiny.run(directory, options.pop("method", "fedavg"), executor="serial", rounds=1, **options)
    return load_file(run.directory / "model.safetensors")


@pytest.mark.slow
def test_a_compiled_network_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    plain = torch.compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        function = plain(*args, **kwargs)

        def counted(x: torch.Tensor) -> Any:
            nonlocal calls
            calls += 1
            return function(x)

        return counted

    monkeypatch.setattr(torch, "compile", compiled)
    expected = weights(tmp_path / "eager")
    actual = weights(tmp_path / "compiled", compile=True)
    assert calls > 0
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_what_the_compiler_cannot_do_runs_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def refuse(_: torch.Tensor) -> Any:
            raise RuntimeError("no compiler here")

        return refuse

    monkeypatch.setattr(torch, "compile", broken)
    expected = weights(tmp_path / "eager")
    actual = weights(tmp_path / "broken", compile=True)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert "runs without torch.compile: no compiler here." in caplog.text


def test_a_method_with_a_forward_of_its_own_says_that_nothing_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fedkeel"):
        weights(tmp_path / "greg", method="greg", compile=True)
    assert "'greg' has a forward pass of its own: the network is not compiled." in caplog.text
