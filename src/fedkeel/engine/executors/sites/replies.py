"""What a site says of an evaluation, as far as it can be: its numbers are a stranger's."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedkeel.config import STATISTICS
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import BadMessage, is_whole, reading, shown
from fedkeel.engine.executors.sites.roster import MOST_SAMPLES
from fedkeel.engine.measuring import ALWAYS
from fedkeel.engine.metrics import Metric
from fedkeel.formulas.measures import Measure

SPLITS = ("test", "validation")
LARGEST_LOSS = 1e15  # of a sample; a sum of such is still a number


def evaluations_of(
    client: str, domain: str, given: object, metrics: Mapping[str, Metric], classes: int = 0
) -> list[Evaluation]:
    """As a site sent them: at most one of each split and kind of statistics."""
    if not isinstance(given, list) or len(given) > len(SPLITS) * len(STATISTICS["all"]):
        raise BadMessage("its evaluations are not a list, or too many")
    with reading("an evaluation of it cannot be read"):
        found = [_evaluation(client, domain, entry, metrics, classes) for entry in given]
    if len({(evaluation.split, evaluation.statistics) for evaluation in found}) < len(found):
        raise BadMessage("it evaluated the same images twice")
    return found


def _evaluation(client: str, domain: str, given: Any, metrics: Mapping[str, Metric], classes: int) -> Evaluation:
    """Whose it is, the server knows better. A model that diverged has no loss, and still its accuracy."""
    split, kind, correct, samples = (given[name] for name in ("split", "statistics", "correct", "samples"))
    if split not in SPLITS or kind not in STATISTICS["all"]:
        raise BadMessage(f"an evaluation of it is of {shown(split)} with {shown(kind)} statistics")
    if not is_whole(correct) or not is_whole(samples) or not 0 <= correct <= samples < MOST_SAMPLES or samples == 0:
        raise BadMessage(f"an evaluation of it has {shown(correct)} right of {shown(samples)}")
    most = LARGEST_LOSS * samples
    (loss,) = _numbers({"loss": given["loss_sum"]}, {"loss"}, most).values()
    sums = _numbers(given.get("metric_sums", {}), {n for n, metric in metrics.items() if metric.per_sample}, most)
    whole = _numbers(given.get("values", {}), {n for n, metric in metrics.items() if not metric.per_sample}, most)
    found = Evaluation(client, domain, split, kind, correct, samples, loss if loss >= 0 else math.nan, sums, whole)
    return replace(found, details=_details(given.get("details"), found, {*ALWAYS, *metrics}, classes))


def _numbers(given: Any, names: Collection[str], most: float) -> dict[str, float]:
    """Numbers by these names; one that is not finite, or too large, is not known."""
    if given.keys() != set(names) or not all(type(value) in (int, float, type(None)) for value in given.values()):
        raise BadMessage(f"an evaluation of it has the numbers {shown(given)}")
    known = {name: value is not None and abs(value) <= most for name, value in given.items()}
    return {name: float(value) if known[name] else math.nan for name, value in given.items()}


def _details(given: Any, of: Evaluation, names: Collection[str], classes: int) -> dict[str, Any] | None:
    """What a site tells of its test set, if it does: the cells of a confusion matrix, and measures."""
    if given is None:
        return None
    cells, told = np.array(given["confusion"]), given["measures"]
    if cells.dtype.kind != "i" or cells.shape[1:] != (3,) or cells.min() < 0 or cells[:, :2].max() >= classes:
        raise BadMessage("its confusion matrix is none")
    true, said, images = cells.T
    if (images.sum(), images[true == said].sum()) != (of.samples, of.correct):
        raise BadMessage("its confusion matrix is of other images than it counts")
    measures = {name: Measure.of(one) for name, one in told.items()}
    nested = [part for one in measures.values() for part in one.classes if part.classes]
    lengths = {len(one.classes) for one in measures.values()}
    if nested or not lengths <= {0, classes} or not measures.keys() <= set(names):
        raise BadMessage(f"its measures are {shown(told)}")
    return {"confusion": cells.tolist(), "measures": {name: one.to_list() for name, one in measures.items()}}
