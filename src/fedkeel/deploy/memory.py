"""What a site keeps in files of its own, which survives a restart and never travels: what its method remembers between
rounds, and what it has spent of its privacy over all runs."""

import json
import re
import shutil
from pathlib import Path

from fedkeel.config import Config
from fedkeel.core.messages import BadMessage, pack, unpack
from fedkeel.core.state import Tensors
from fedkeel.deploy.policy import DELTA, Policy
from fedkeel.errors import StoreError
from fedkeel.files import Unsealed, explained, seal, unseal, write_atomically
from fedkeel.trust import privacy

Step = tuple[int, int]  # round, and which request of that round
KEPT_RUNS = 3
RUN = re.compile(r"[0-9a-f]{16}")  # the name of one


class SiteMemory:
    """What a site remembers of one run, in files: a state after each request that changed it.

    The server says with each request after which of them the site's memory counts. What came later did not happen:
    an update that was dropped, a reply that came too late, rounds that a server repeats from its last checkpoint. So
    states of the last few rounds are kept, as far back as the server's checkpoints can go.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep_rounds = folder, keep

    def after(self, step: Step | None) -> Tensors:
        """What was remembered after this step, or at first; whatever came later is forgotten."""
        states = self._states()
        for known in list(states):
            if step is None or known > step:
                states.pop(known).unlink(missing_ok=True)
        if not states:
            return {}
        path = states[max(states)]
        try:
            return unpack(path.read_bytes())[1].get("memory", {})
        except (OSError, BadMessage) as error:
            raise StoreError(
                f"What this site remembers of the run, '{path}', cannot be read ({error}): put it back from a copy, or "
                "begin a new run."
            ) from error

    def keep(self, step: Step, memory: Tensors) -> None:
        """Remember this after the step."""
        if not memory and not self._states():
            return
        if not self.folder.exists():
            forget_other_runs(self.folder)
            self.folder.mkdir(parents=True)
        path = self.folder / f"{step[0]:06d}-{step[1]:04d}.safetensors"
        write_atomically(path, pack({}, memory=memory))
        # Of the states older than any checkpoint, the newest is still what a repeated round may begin with.
        old = sorted(path for known, path in self._states().items() if known[0] <= step[0] - self.keep_rounds)
        for path in old[:-1]:
            path.unlink(missing_ok=True)

    def _states(self) -> dict[Step, Path]:
        found = {path: path.stem.split("-") for path in self.folder.glob("*.safetensors")}
        return {(int(round), int(number)): path for path, (round, number) in found.items()}


def forget_other_runs(folder: Path) -> None:
    """Keep what is of the latest few runs; a site does not grow with every run it took part in."""
    others = [path for path in folder.parent.glob("*") if RUN.fullmatch(path.name) and path != folder]
    others.sort(key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) - KEPT_RUNS + 1)]:
        shutil.rmtree(path, ignore_errors=True)


class PrivacyLedger:
    """What a site has spent of its privacy, over all runs.

    The server counts epsilon too, but a site does not take its word: here is counted every training that is begun,
    one that is repeated too, and one that would exceed the site's policy is refused.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "privacy.json"

    def charge(self, config: Config, samples: int, policy: Policy) -> None:
        """Count a training before it is done; or refuse it."""
        done = self.read()
        kind = json.dumps([config.dp_noise, privacy.sampling_rate(config, samples)])
        done[kind] = done.get(kind, 0) + privacy.local_steps(config, samples)
        if policy.epsilon:
            privacy.require_accountant()
            spent = privacy.composed([(*json.loads(kind), steps) for kind, steps in done.items()], DELTA)
            asked = f"{spent:.3g} as the epsilon of all that was trained here"
            policy.require("epsilon", spent <= policy.epsilon, asked)
        with explained(self._path, ""):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, seal(done))

    def read(self) -> dict[str, int]:
        """The steps of each pair of noise multiplier and sampling rate."""
        try:
            return unseal(self._path.read_bytes()) if self._path.exists() else {}
        except (OSError, Unsealed) as error:
            raise StoreError(
                f"'{self._path}', the account of what was spent of this site's privacy, cannot be read: put it back "
                "from a copy."
            ) from error
