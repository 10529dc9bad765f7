"""What clients remember: in memory up to a limit, the rest on disk, and the same bits from both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.state import Tensors
from fedkeel.engine import memory as module
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.memory_files import MemoryFiles
from tests import tiny


def remembered(value: float, numbers: int = 25) -> Tensors:
    """A hundred bytes for 25 numbers."""
    return {"part/x": torch.full((numbers,), float(value))}


def held(memory: ClientMemory) -> list[str]:
    return list(memory._held)


def on_disk(folder: Path) -> int:
    return len(list(folder.glob("*.safetensors")))


def test_below_the_limit_nothing_is_written(tmp_path: Path) -> None:
    memory = ClientMemory(limit=300, files=MemoryFiles(tmp_path / "memory"))
    for name in "abc":
        memory.keep(name, remembered(1))
    assert held(memory) == ["a", "b", "c"]
    assert not (tmp_path / "memory").exists()


def test_the_least_recently_used_go_to_disk_and_come_back(tmp_path: Path) -> None:
    memory = ClientMemory(limit=300, files=MemoryFiles(tmp_path))
    for value, name in enumerate("abc"):
        memory.keep(name, remembered(value))
    memory.of("a")  # b is now the one that was not used for longest
    memory.keep("d", remembered(3))
    assert held(memory) == ["c", "a", "d"]
    memory.keep("c", remembered(7, 50))  # 200 bytes: a goes too
    assert held(memory) == ["d", "c"]
    assert [float(memory.of(name)["part/x"][0]) for name in "abcd"] == [0, 1, 7, 3]
    assert held(memory) == ["c", "d"]  # reading pushes nobody out
    assert on_disk(tmp_path) == 2
    assert sorted(memory) == ["a", "b", "c", "d"]


def test_what_is_larger_than_the_limit_is_on_disk_alone(tmp_path: Path) -> None:
    memory = ClientMemory(limit=0, files=MemoryFiles(tmp_path))
    memory.keep("a", remembered(2))
    memory.keep("a", remembered(3))
    assert held(memory) == []
    assert memory.of("a")["part/x"].tolist() == [3.0] * 25
    assert on_disk(tmp_path) == 1  # the version before it was in no checkpoint


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    memory = ClientMemory(limit=100, files=shelf)
    memory.keep("a", remembered(1))
    memory.write_files()
    memory.write_files()
    assert held(memory) == ["a"]
    memory.keep("b", remembered(2))  # a leaves; the shelf has it
    assert held(memory) == ["b"]
    memory.write_files()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000000.safetensors", "00000001.safetensors"]


def test_every_kind_of_tensor_comes_back_bit_for_bit_in_its_order(tmp_path: Path) -> None:
    tensors = {
        "z": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "local/encoder.1.num_batches_tracked": torch.tensor(2**40),
        "a": torch.randn(3, 4).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.empty(0, 3),
    }
    memory = ClientMemory(limit=0, files=MemoryFiles(tmp_path))
    memory.keep("a client/with any name", tensors)
    back = memory.of("a client/with any name")
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        bits = [t.contiguous().flatten().view(torch.uint8).tolist() for t in (back[name], tensor) if t.numel()]
        assert bits[:1] == bits[1:]


def test_tensors_come_back_on_the_device_of_the_run(tmp_path: Path) -> None:
    memory = ClientMemory(limit=0, files=MemoryFiles(tmp_path), device="meta")
    memory.keep("a", remembered(1))
    assert memory.of("a")["part/x"].device.type == "meta"


@pytest.mark.gpu
def test_what_was_on_the_gpu_comes_back_there(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    device = torch.device("cuda")
    memory = ClientMemory(limit=0, files=MemoryFiles(tmp_path), device=device)
    tensors = {"x": torch.randn(1000, device=device)}
    memory.keep("a", tensors)
    assert memory.of("a")["x"].device.type == "cuda"
    assert memory.of("a")["x"].equal(tensors["x"])


def test_forgetting_takes_it_off_the_shelf(tmp_path: Path) -> None:
    memory = ClientMemory(limit=0, files=MemoryFiles(tmp_path))
    memory.keep("a", remembered(1))
    memory.keep("a", {})
    assert memory.of("a") == {}
    assert "a" not in memory
    assert on_disk(tmp_path) == 0


def test_looking_at_all_uses_nobody(tmp_path: Path) -> None:
    memory = ClientMemory(limit=200, files=MemoryFiles(tmp_path))
    for value, name in enumerate("abc"):
        memory.keep(name, remembered(value))
    assert {name: float(t["part/x"][0]) for name, t in memory.items()} == {"a": 0.0, "b": 1.0, "c": 2.0}
    assert [float(memory.look(name)["part/x"][0]) for name in "bac"] == [1, 0, 2]
    assert memory.look("d") == {}
    assert held(memory) == ["b", "c"]


def test_a_temporary_folder_is_removed_in_the_end() -> None:
    memory = ClientMemory(limit=0)
    memory.keep("a", remembered(1))
    folder = memory._files.folder
    assert on_disk(folder) == 1
    del memory
    assert not folder.exists()


# -- whole runs ----------------------------------------------------------------------------------------------
METHODS = ["fedbn", "standalone", "fedcoda", "hbn", "hbn(variant=released)"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_keeps_nothing_in_memory_is_the_same_run(tmp_path: Path, method: str, executor: str) -> None:
    options: dict[str, Any] = {"rounds": 3, "participation": 0.7, **tiny.by(executor)}
    plain = tiny.run(tmp_path / "plain", method, **options)
    spilled = tiny.run(tmp_path / "spilled", method, memory_limit=0, **options)
    assert tiny.result(spilled) == tiny.result(plain)


def test_the_limit_is_in_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    plain = module.ClientMemory.__init__

    def noted(self: ClientMemory, stateless: bool = False, **options: Any) -> None:
        limits.append(options["limit"])
        plain(self, stateless, **options)

    monkeypatch.setattr(module.ClientMemory, "__init__", noted)
    tiny.setup(memory_limit=3).executor()
    assert limits == [3 * 1024 * 1024]


@pytest.mark.slow
def test_a_checkpoint_costs_what_changed_not_what_all_remember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty clients, two a round: at the end as many files are written a round as in the beginning."""
    written: list[str] = []
    plain = Path.write_bytes

    def noted(self: Path, data: bytes) -> int:
        if "live" not in self.name:  # which only tells of this moment
            written.append(self.name)
        return plain(self, data)

    monkeypatch.setattr(Path, "write_bytes", noted)
    on = tiny.federation({f"c{i:02d}": 3 for i in range(40)})
    per_round: list[int] = []
    sizes: list[int] = []

    def look(_: int) -> None:
        per_round.append(len(written))
        written.clear()
        folder = max((tmp_path / "r" / "checkpoints").iterdir())
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))

    tiny.run(tmp_path / "r", "fedbn", on=on, participation=0.05, rounds=12, observer=tiny.Notes(look))
    assert per_round == [2] * 12
    assert max(sizes) - min(sizes) < 50  # numbers with more digits
