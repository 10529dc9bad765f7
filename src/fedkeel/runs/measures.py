"""What the model that a run ends with does on every test set: `measures.json`, read and written.

The file has, of each site, the confusion matrix as its cells (class, class it is taken for, images) and the measures
that do not follow from it, each as value, low, high and, where it has them, the same of each class. A site is a domain:
where several clients share one, its numbers are the means over them, as those of accuracy are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedkeel.config import Config, first_of
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.naming import file_name
from fedkeel.core.readable import DASH, csv_table, text_table
from fedkeel.engine.measuring import ALWAYS, probabilities
from fedkeel.engine.metrics import Metric, selection
from fedkeel.errors import FedkeelError, nearest, quoted
from fedkeel.files import parsed
from fedkeel.formulas.measures import Array, Measure, mean_of, of_confusion
from fedkeel.runs.intact import Files
from fedkeel.runs.tables import need_pandas

if TYPE_CHECKING:
    import pandas

FILE = "measures.json"
TOO_WIDE = 0.3  # an interval of accuracy that tells nothing


class Measured(Files):
    """A run directory that has measures."""

    config: Config

    @property
    def how_good(self) -> Callable[[Mapping[str, Any]], float]:
        """Of one entry of `scores`, by what `select_by` names: the higher the better."""
        return selection(self.config)

    @cached_property
    def measures(self) -> Measures:
        """What the resulting model does on every test set, by site and class, with intervals."""
        if not self.has_measures:
            raise FedkeelError(
                f"'{self.directory}' has no {FILE}, with measures beyond accuracy: it is not finished, is of an "
                "earlier version, or its sites do not tell by class; finish it, or train it anew."
            )
        data = self.intact(FILE)
        try:
            return Measures.read(data)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
            raise self.changed(FILE, f"tables cannot be read ({type(error).__name__})") from error

    @property
    def has_measures(self) -> bool:
        return (self.directory / FILE).exists()

    def measure(self, name: str) -> dict[str, Measure]:
        """A measure such as "auc" of each site: its `value`, `low` and `high`, and those of its `classes`."""
        return self.measures.of(name)

    def confusion(self, site: str | None = None) -> pandas.DataFrame:
        """How many test images of each class (rows) are taken for each (columns): of a site, or of all trained ones."""
        measures = self.measures
        return need_pandas().DataFrame(measures.confusion(site), index=measures.classes, columns=measures.classes)


def reported(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Those under the statistics that results are told of."""
    told = first_of(evaluation.statistics for evaluation in evaluations)
    return [e for e in evaluations if e.statistics == told and e.details]


def document(
    evaluations: Sequence[Evaluation], classes: Sequence[str], unseen: Sequence[str], metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    keys = [bytes(e.outputs.images.sort().values.numpy()) if e.outputs else e.client for e in evaluations]
    times = Counter(keys)  # that a test set is tested on: clients of a domain may share theirs
    return {
        "classes": list(classes),
        "unseen": list(unseen),
        "lower_is_better": [name for name, metric in {**ALWAYS, **metrics}.items() if metric.lower],
        "sites": [
            {"client": e.client, "domain": e.domain, "times": times[key], **(e.details or {})}
            for e, key in zip(evaluations, keys, strict=True)
        ],
    }


def predictions(
    evaluations: Sequence[Evaluation], classes: Sequence[str], paths: Sequence[str], unit: str = "image"
) -> Iterator[tuple[str, bytes]]:
    """A table for each client: the image's path, or else its position in the data, its class, the predicted one, all
    probabilities."""
    for evaluation in evaluations:
        if evaluation.outputs is None:
            continue
        logits, labels, images = evaluation.outputs
        said, chances = logits.argmax(1).tolist(), probabilities(evaluation.outputs).tolist()
        rows = zip(images.tolist(), labels.tolist(), said, chances, strict=True)
        lines = [
            [paths[image] if paths else image, classes[label], classes[predicted], *row]
            for image, label, predicted, row in sorted(rows)
        ]
        headings = [unit, "label", "predicted", *(f"p({name})" for name in classes)]
        yield f"predictions/{file_name(evaluation.client)}.csv", csv_table([headings, *lines]).encode()


class Site(NamedTuple):
    """One client's test set."""

    client: str
    domain: str
    confusion: Array  # (C, C)
    measures: dict[str, Measure]
    times: int  # so many clients are tested on these images

    @property
    def samples(self) -> int:
        return int(self.confusion.sum())

    def of(self, name: str) -> Measure:
        """No number where the site did not tell."""
        return self.measures.get(name, Measure(np.nan, np.nan, np.nan))


@dataclass(frozen=True, repr=False)
class Measures:
    """The numbers of a run beyond its accuracy, each with its 95 % interval."""

    classes: tuple[str, ...]
    unseen: frozenset[str]
    lower_is_better: frozenset[str]
    sites: tuple[Site, ...]

    @staticmethod
    def read(text: bytes) -> Measures:
        """An error of any kind where the file is not one that a run wrote."""
        return Measures.of_document(parsed(text))

    @staticmethod
    def of_document(given: Mapping[str, Any]) -> Measures:
        count, sites = len(given["classes"]), []
        for site in given["sites"]:
            confusion = np.zeros((count, count), dtype=np.int64)
            for true, said, images in site["confusion"]:
                confusion[true, said] += images
            told = {name: Measure.of(measure) for name, measure in site["measures"].items()}
            measures, times = of_confusion(confusion) | told, int(site.get("times", 1))
            sites.append(Site(site["client"], site["domain"], confusion, measures, times))
        unseen, lower = (frozenset(given[name]) for name in ("unseen", "lower_is_better"))
        texts = [*given["classes"], *unseen, *lower, *(text for site in sites for text in (site.client, site.domain))]
        if not sites or not all(isinstance(text, str) for text in texts) or any(site.times < 1 for site in sites):
            raise ValueError("names are not text")
        return Measures(tuple(given["classes"]), unseen, lower, tuple(sites))

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for site in self.sites for name in site.measures))

    @cached_property
    def domains(self) -> dict[str, list[Site]]:
        found: dict[str, list[Site]] = {}
        for site in self.sites:
            found.setdefault(site.domain, []).append(site)
        return found

    @property
    def trained(self) -> list[str]:
        """The domains that were trained on; where nothing else was tested, all."""
        return [name for name in self.domains if name not in self.unseen] or list(self.domains)

    def of(self, name: str) -> dict[str, Measure]:
        """A measure of each site; what was not measured is refused."""
        if name not in self.names:
            raise FedkeelError(f"'{name}' was not measured: {nearest(name, self.names)}")
        groups = {d: ([s.of(name) for s in sites], sites[0].times > 1) for d, sites in self.domains.items()}
        return {d: group[0] if len(group) == 1 else mean_of(group, same=same) for d, (group, same) in groups.items()}

    def samples(self, domain: str) -> int:
        """Its test images; those that several clients share, once."""
        return round(sum(site.samples / site.times for site in self.domains[domain]))

    def average(self, name: str, *, unseen: bool = False) -> Measure:
        """Over the sites that were trained on, each counting the same; or over the unseen ones."""
        return mean_of([measure for site, measure in self.of(name).items() if (site in self.unseen) == unseen])

    def confusion(self, site: str | None = None, *, once: bool = False) -> Array:
        """Of one site, or of all that were trained on together; rows are the true classes. `once`: an image that
        several clients are tested on counts once in all."""
        if site is not None and site not in self.domains:
            raise FedkeelError(f"There is no site '{site}': {nearest(site, list(self.domains))}")
        found = [entry for name in (self.trained if site is None else [site]) for entry in self.domains[name]]
        return np.asarray(sum(entry.confusion / entry.times if once else entry.confusion for entry in found))

    def by_class(self) -> dict[str, tuple[Measure, ...]]:
        """Of each class: what follows from the confusion matrix of all trained sites together, else the mean over
        them."""
        whole = of_confusion(self.confusion(once=True))
        found = {name: measure.classes for name, measure in whole.items() if measure.classes}
        trained = [site for domain in self.trained for site in self.domains[domain]]
        shared = any(site.times > 1 for site in trained)
        for name in self.names:
            parts = [site.of(name).classes for site in trained if site.of(name).classes]
            if parts and name not in found:
                found[name] = tuple(mean_of(one, same=shared) for one in zip(*parts, strict=True))
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each number of each client, and of each of its classes, which is empty for all together."""
        for site in self.sites:
            for name, measure in site.measures.items():
                for label, one in (("", measure), *zip(self.classes, measure.classes, strict=False)):
                    known = {"client": site.client, "domain": site.domain, "class": label, "measure": name}
                    yield known | dict(zip(("value", "low", "high"), one, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """For a script: each measure with its interval, of every site and on average over those trained on."""
        found: dict[str, Any] = {"notes": self.notes()}
        for name in self.names:
            sites = {site: measure.to_list()[:3] for site, measure in self.of(name).items()}
            found[name] = {"average": self.average(name).to_list(), "sites": sites}
        for name, measures in self.by_class().items():
            found[name]["classes"] = {c: one.to_list() for c, one in zip(self.classes, measures, strict=True)}
        return found

    def __repr__(self) -> str:
        accuracy, average = self.of("accuracy"), self.average("accuracy")
        rows = [(site, f"{self.samples(site):,}", interval(measure)) for site, measure in accuracy.items()]
        return text_table(f"Accuracy in %: {interval(average)} on average", [("site", "samples", "accuracy"), *rows])

    def notes(self) -> list[str]:
        """What a person should know before believing the numbers."""
        if not self.sites:
            return []
        whole, notes = self.confusion(once=True), []
        present, said = whole.sum(1) > 0, whole.sum(0) > 0
        balanced, chance = of_confusion(whole)["balanced-accuracy"], 1 / max(1, int(present.sum()))
        if present.sum() > 1 and balanced.low <= chance:
            notes.append(
                f"The model is at chance level: its balanced accuracy over all sites is {interval(balanced)} %, and "
                f"guessing among {int(present.sum())} classes gives {100 * chance:.1f} %."
            )
        if never := [name for name, is_lost in zip(self.classes, present & ~said, strict=True) if is_lost]:
            notes.append(f"Never predicted at any site: {quoted(never)} of {int(present.sum())} classes.")
        known = self.of("accuracy")
        if small := [name for name, share in known.items() if share.high - share.low > TOO_WIDE]:
            first = f"'{small[0]}' has {self.samples(small[0])}"
            notes.append(
                f"Too few test samples to tell much: {quoted(small)} ({first}, and its accuracy is "
                f"{interval(known[small[0]])} %)."
            )
        return notes


def interval(measure: Measure, scale: float = 100.0) -> str:
    """A number and its interval for a table: '81.2 (75.0 to 86.1)', '-' for what is not known."""
    if not np.isfinite(measure.value):
        return DASH
    value, low, high = (f"{scale * number:.1f}" if scale == 100 else f"{number:.3g}" for number in measure[:3])
    return f"{value} ({low} to {high})" if np.isfinite(measure.low) else value
