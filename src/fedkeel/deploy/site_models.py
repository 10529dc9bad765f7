"""What `fedkeel join --calibrate` keeps: the model that a run ends with, with this site's own statistics mixed in (see
docs/calibration.md). It lies in a folder of the site and never travels; no server can ask for it or knows of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import fedkeel
from fedkeel.config import from_one
from fedkeel.core.messages import Broadcast
from fedkeel.core.state import Tensors
from fedkeel.deploy.memory import forget_other_runs
from fedkeel.engine.batches import probe
from fedkeel.engine.local import Worker
from fedkeel.errors import first_line
from fedkeel.files import make_folder
from fedkeel.nn.calibration import PRIOR, Calibration, normalised_layers, refuse_without_statistics
from fedkeel.runs.export import describe
from fedkeel.runs.site_model import SiteModel

FILE = "calibrated.safetensors"
MOST_IMAGES = 1000  # the server waits, and more would hardly change the statistics
log = logging.getLogger("fedkeel")


@dataclass
class SiteModels:
    """`folder/RUN/calibrated.safetensors`, of the latest few runs: the last model of each that the site was sent.

    Attributes:
        calibrate: whether the site wants them; without, it keeps what a personal method has made for it, as it is.
    """

    folder: Path
    calibrate: bool = True
    _told: set[str] = field(default_factory=set, init=False)

    def keep(self, run: str, worker: Worker, broadcast: Broadcast, memory: Tensors, why: str) -> None:
        """Calibrate the model of a broadcast, which was sent to be "tested" or "to be trained", and write it."""
        personal = worker.method.is_personal
        if not self.calibrate and not personal:
            return
        try:
            (site,) = worker.federation
            calibration = None
            if self.calibrate and (normalised_layers(worker.model) or not personal):
                refuse_without_statistics(worker.model, f"The model of the run '{run}'")
                calibration = calibrated(worker, broadcast, memory)
            else:
                worker.load_tested(broadcast, memory)
            card = describe("safetensors", worker.federation.classes, probe(worker.federation))
            card |= {option: getattr(worker.config, option) for option in ("method", "model")}
            card |= {"run": run, "site": site.name, "round": from_one(broadcast.round), "sent_to_be": why}
            card |= {"calibration": calibration.to_dict() if calibration else {}, "version": fedkeel.__version__}
            path = self.folder / run / FILE
            if not path.parent.exists():
                forget_other_runs(path.parent)
                make_folder(path.parent)
            SiteModel(dict(worker.entries), card).write(path)
            sentences = calibration.sentences() if calibration else ()
            log.info("The model for this site is in '%s'. %s", path, " ".join(sentences))
        except Exception as error:  # whatever it is, the server gets its reply
            if run not in self._told:
                log.warning("The model for this site is not kept: %s", first_line(error))
            self._told.add(run)


def calibrated(worker: Worker, broadcast: Broadcast, memory: Tensors) -> Calibration:
    """Calibrate the worker's model, as the broadcast has it with the site's own layers, on the site's own images."""
    (site,) = worker.federation
    stranger = worker.load_tested(broadcast, memory)
    all_of_it = replace(site, train=site.train if len(site.train) else site.test)
    prior = 0.0 if stranger else PRIOR
    return worker.evaluator.calibrate(all_of_it, MOST_IMAGES, prior, always=stranger)[1]
