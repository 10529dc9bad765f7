"""A method that keeps a learnable tensor is personal without saying so: FedPer, with what CONTRIBUTING says alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fedkeel.core.composition import Composition
from fedkeel.errors import MethodError
from fedkeel.methods import Method, build
from fedkeel.runs.run import Run
from tests import tiny


class FedPer(Method):
    """Arivazhagan et al., 2019: the head stays on the client."""

    def prepare(self, model: nn.Module) -> None:
        self.kept = [f"head.{entry}" for entry in model.get_submodule("head").state_dict()]


def own(run: Run, client: str) -> dict[str, torch.Tensor]:
    common = safetensors.torch.load_file(run.directory / "model.safetensors")
    assert "head.weight" not in common, "what nobody trained must not pass for a part of a model"
    return common | safetensors.torch.load_file(run.directory / "personal" / f"{client}.safetensors")


@pytest.mark.parametrize("parts", [(), ("greg",), ("fedprox", "hbn")])
def test_every_client_is_tested_with_the_head_that_it_has_trained(tmp_path: Path, parts: tuple[str, ...]) -> None:
    run = tiny.run(tmp_path / "r", Composition([FedPer(), *map(build, parts)]), rounds=6, learning_rate=0.3)
    heads = [own(run, client)["head.weight"] for client in tiny.SIZES]
    assert not torch.equal(heads[0], heads[1])
    tested = {r["client"]: r["accuracy"] for r in run.records("evaluation") if (r["split"], r["round"]) == ("test", 5)}
    assert tested.keys() == tiny.SIZES.keys()
    data, network = tiny.federation(), run.model("ward")
    for client in tiny.SIZES:
        network.load_state_dict(own(run, client), strict=True)
        test = data[client].test
        x = data.test_transform(data.images[test], torch.empty(len(test), 0))
        with torch.no_grad():
            right = network(x).logits.argmax(1) == data.labels[test]
        assert tested[client] == pytest.approx(right.float().mean().item())


@pytest.mark.parametrize("method", ["hbn", "fedsr"])
def test_methods_that_keep_what_no_test_uses_have_one_model_for_all(tmp_path: Path, method: str) -> None:
    run = tiny.run(tmp_path / "r", method)
    x = torch.rand(5, 3, 8, 8)
    network = run.model()
    before = network(x).logits
    for name in build_kept(method):
        network.get_parameter(name).data.normal_()
    assert torch.equal(network(x).logits, before), "whoever is tested, what a client keeps would change nothing"


def build_kept(name: str) -> list[str]:
    method = build(name)
    method.prepare(tiny.model())
    assert method.kept
    return list(method.kept)


def test_what_only_one_name_says_wrongly_is_refused() -> None:
    class Misspelt(Method):
        kept = ("head.wieght",)

    with pytest.raises(
        MethodError, match=r"'misspelt' keeps 'head.wieght'.* does not have: did you mean 'head.weight'"
    ):
        tiny.setup(Misspelt())


def test_who_keeps_a_head_remembers_and_is_not_pooled() -> None:
    with pytest.raises(MethodError, match="'fedper' needs clients that remember"):
        tiny.setup(FedPer(), stateless=True)
    with pytest.raises(MethodError, match="nothing that 'fedper' could keep"):
        tiny.setup(Composition([build("central"), FedPer()]))
