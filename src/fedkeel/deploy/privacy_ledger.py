"""What a site has spent of its privacy, over all runs, in a file of its own.

The server counts epsilon too, but a site does not take its word: here are counted the trainings that were really done,
and one that would exceed the site's policy is refused. The same training once more, as after a crash, has the same
noise and the same result, and costs nothing.
"""

from collections import Counter
from pathlib import Path

from fedkeel.config import Config
from fedkeel.deploy.policy import Policy
from fedkeel.errors import StoreError
from fedkeel.files import Unsealed, explained, seal, unseal, write_atomically
from fedkeel.trust import privacy


class PrivacyLedger:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "privacy.json"

    def charge(self, training: str, config: Config, samples: int, policy: Policy) -> None:
        """Count a training, known by all that it depends on, before it is done; or refuse it."""
        done = self.read()
        if training in done:
            return
        rate, steps = privacy.sampling_rate(config, samples), privacy.local_steps(config, samples)
        done[training] = [config.dp_noise, rate, steps]
        if policy.epsilon:
            privacy.require_accountant()
            policy.at_most("epsilon", epsilon(done, policy.delta), "as the epsilon of all that was trained here")
        with explained(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, seal(done))

    def read(self) -> dict[str, list[float]]:
        """Of each training: noise multiplier, sampling rate and steps."""
        try:
            return unseal(self._path.read_bytes()) if self._path.exists() else {}
        except (OSError, Unsealed) as error:
            raise StoreError(
                f"'{self._path}', the account of what was spent of this site's privacy, cannot be read: put it back "
                "from a copy."
            ) from error


def epsilon(done: dict[str, list[float]], delta: float) -> float:
    kinds = Counter[tuple[float, float]]()
    for noise, rate, steps in done.values():
        kinds[noise, rate] += int(steps)
    return privacy.composed([(noise, rate, steps) for (noise, rate), steps in kinds.items()], delta)
