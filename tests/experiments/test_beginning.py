"""A run of what the method, the network or the data were before is not taken for one of a comparison."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedkeel.core.method import Method
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import compare
from fedkeel.methods import METHODS, register
from tests.data.made_up import image, tree
from tests.experiments.made_up import TINY, Watching


def mine(factor: float) -> type[Method]:
    """A method from a file of one's own, which is written anew."""
    module = types.ModuleType("mine_own")
    module.__file__ = str(FOLDER[0] / "mine_own.py")
    text = f"class Mine(Method):\n def gradients(self, c, r):\n  for p in c.model.parameters(): p.grad *= {factor}\n"
    Path(module.__file__).write_text(text)
    exec(text, vars(module) | {"Method": Method, "__name__": "mine_own"}, vars(module))
    sys.modules["mine_own"] = module
    found: type[Method] = module.Mine
    return found


FOLDER: list[Path] = []


@pytest.mark.slow
class TestOutdated:
    """A run of what the method or the data were before is not one of these."""

    @pytest.fixture(autouse=True)
    def own_methods(self, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
        FOLDER[:] = [tmp_path_factory.mktemp("own")]
        monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
        register("mine")(mine(1.0))

    def test_a_method_that_was_written_anew_is_not_taken_from_an_old_run(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"seeds": 1, "directory": tmp_path / "c", "jobs": 1, **TINY}
        first = compare(["mine", "fedavg"], **options)
        assert compare(["mine", "fedavg"], **options).rows() == first.rows()
        register("mine")(mine(0.0))
        with pytest.raises(FedkeelError, match=r"seed0' holds another run \(the code of 'mine_own.py' has changed"):
            compare(["mine", "fedavg"], **options)

    def test_without_a_directory_it_trains_anew_beside_the_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        compare(["mine"], seeds=1, jobs=1, **TINY)
        register("mine")(mine(0.0))
        watching = Watching()
        again = compare(["mine"], seeds=1, jobs=1, observer=watching, **TINY)
        assert again.directory == Path("runs/compare-digits-shift-2")
        assert watching.started == ["mine seed 0 from 0"]
        assert Path("runs/compare-digits-shift/mine/seed0/summary.json").exists()
        watching = Watching()
        assert compare(["mine"], seeds=1, jobs=1, observer=watching, **TINY).directory == again.directory
        assert watching.started == []

    @pytest.mark.parametrize("finished", [True, False])
    def test_other_data_are_noticed_for_every_seed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
    ) -> None:
        monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
        root = tree(tmp_path / "images", ["a", "b"], ["cat", "dog"], 12)
        data = {
            "data": f"folder(root={root}, size=32)",
            "subsample": 0,
            "partition": "dirichlet(alpha=5, clients=2, minimum=1)",
        }
        options: dict[str, Any] = {"directory": tmp_path / "c", "jobs": 1, **TINY, **data}
        compare(["fedavg"], seeds=[0, 1], **options)
        assert len(compare(["fedavg"], seeds=[0, 1], **options).runs) == 2
        shutil.rmtree(tmp_path / "c" / "fedavg" / "seed0")  # of which the data are divided by the seed that is tried
        if not finished:
            (tmp_path / "c" / "fedavg" / "seed1" / "summary.json").unlink()
        image(root / "b" / "dog" / "003.png", (7, 7, 7))
        with pytest.raises(FedkeelError, match=r"seed1' holds another run \(its data have changed: the .* of 'b'"):
            compare(["fedavg"], seeds=[0, 1], **options)

    def test_what_follows_from_the_seed_is_no_change(self, tmp_path: Path) -> None:
        """Who has which images, and with `subsample` which images are had at all, also where they are pooled."""
        options: dict[str, Any] = {"directory": tmp_path, "jobs": 1, **TINY, "partition": "even(clients=2)"}
        first = compare(["central", "fedavg"], seeds=[0, 1], **options)
        watching = Watching()
        assert compare(["central", "fedavg"], seeds=[0, 1], observer=watching, **options).rows() == first.rows()
        assert watching.started == []
