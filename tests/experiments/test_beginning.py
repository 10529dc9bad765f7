"""A run of what the method, the network or the data were before is put aside, and trained anew."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedkeel.config import Config
from fedkeel.core.method import Method
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import collect_runs, compare, find_trials
from fedkeel.files import seal, unseal
from fedkeel.methods import METHODS, register
from fedkeel.runs.store import Store
from tests.data.made_up import image, tree
from tests.experiments.made_up import TINY, Watching, finish


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


def test_what_is_put_aside_is_no_run_of_the_folders_above_it(tmp_path: Path) -> None:
    place = tmp_path / "c" / "fedavg"
    for name in ("seed0", "seed0-before", "seed0-before-2", "before"):
        finish(place / name, Config(), {"scan": 0.5})
    assert [trial.directory.name for trial in find_trials(tmp_path)] == ["before", "seed0"]
    aside = place / "seed0-before"
    assert [trial.directory for trial in find_trials(aside)] == [aside]  # asked for by its name


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
        before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
        register("mine")(mine(0.0))
        watching, place = Watching(), tmp_path / "c" / "mine"
        again = compare(["mine", "fedavg"], observer=watching, **options)
        assert watching.started == ["mine seed 0 from 0"]
        assert again.runs[0].directory == place / "seed0"
        model = place / "seed0" / "model.safetensors"
        assert model.read_bytes() != before[model]
        assert watching.notes[0] == (
            f"'{place}/seed0' is trained anew, since the code of 'mine_own.py' has changed since then; what it was "
            f"is now '{place}/seed0-before'."
        )
        for path in place.rglob("*-before/**/*"):  # all that it was is there
            was = Path(str(path).replace("-before", ""))
            assert path.is_dir() or path.read_bytes() == before[was]
        register("mine")(mine(1.0))
        assert compare(["mine", "fedavg"], **options).rows() == first.rows()
        assert sorted(path.name for path in place.glob("seed0*")) == ["seed0", "seed0-before", "seed0-before-2"]
        assert collect_runs([tmp_path / "c"]).rows() == first.rows()  # of those that are put aside, none

    def test_what_is_being_trained_is_not_put_aside(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"seeds": 1, "directory": tmp_path, "jobs": 1, **TINY}
        compare(["mine"], **options)
        register("mine")(mine(0.0))
        store = Store.open(tmp_path / "mine" / "seed0")
        with pytest.raises(FedkeelError, match="Another process is running"):
            compare(["mine"], **options)
        store.close()
        assert [path.name for path in (tmp_path / "mine").iterdir()] == ["seed0"]

    def test_without_a_directory_it_trains_anew_beside_the_old_one_and_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        compare(["mine"], seeds=1, jobs=1, **TINY)
        register("mine")(mine(0.0))
        watching = Watching()
        again = compare(["mine"], seeds=1, jobs=1, observer=watching, **TINY)
        assert again.directory == Path("runs/compare-digits-shift-2")
        assert watching.started == ["mine seed 0 from 0"]
        (note,) = [note for note in watching.notes if "is not used again" in note]
        assert "since the code of 'mine_own.py' has changed since then" in note
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
        watching = Watching()
        compare(["fedavg"], seeds=[0, 1], observer=watching, **options)
        assert watching.started == ["fedavg seed 0 from 0", "fedavg seed 1 from 0"]
        assert re.search(r"seed1' is trained anew, since its data have changed: the .* of 'b'", watching.notes[0])

    def test_what_follows_from_the_seed_is_no_change(self, tmp_path: Path) -> None:
        """Who has which images, and with `subsample` which images are had at all, also where they are pooled."""
        options: dict[str, Any] = {"directory": tmp_path, "jobs": 1, **TINY, "partition": "even(clients=2)"}
        first = compare(["central", "fedavg"], seeds=[0, 1], **options)
        watching = Watching()
        assert compare(["central", "fedavg"], seeds=[0, 1], observer=watching, **options).rows() == first.rows()
        assert watching.started == []

    def test_a_run_of_another_version_is_used_and_told(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"seeds": 1, "directory": tmp_path, "jobs": 1, **TINY}
        first = compare(["fedavg"], **options)
        path = tmp_path / "fedavg" / "seed0" / "origin.json"
        path.write_bytes(seal({**unseal(path.read_bytes()), "fedkeel": "0.0.1"}))
        watching = Watching()
        assert compare(["fedavg"], observer=watching, **options).rows() == first.rows()
        assert any("were made by fedkeel 0.0.1" in note for note in watching.notes)
