"""What calibration gains, by the number of images that a site gives to it (docs/calibration.md).

Each client's test set is classified by the model as it is, and after calibration on n images of its own without labels:
by the rule, which takes for the images' look only what neither the class mix nor chance explains; by the prior alone;
and with the client's moments in place of the federation's. A domain that never trained is calibrated on n of its test
images and tested on the others.
"""

from dataclasses import dataclass
from statistics import fmean

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic
from fedkeel.analysis.diagnostic import names
from fedkeel.analysis.figures import Figure, bars, keyed, lines, table
from fedkeel.analysis.snapshot import some_clients
from fedkeel.core.readable import short
from fedkeel.data.federation import Client
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import PRIOR

AS_IT_IS, ALL = "as it is", "all"
WAYS = {"rule": "by the rule", "prior": "by the prior alone", "own": "the site's moments alone"}
UNSEEN = "unseen"


@diagnostic("calibration")
@dataclass
class CalibrationCurve(Diagnostic):
    """Test accuracy when each site mixes the moments of n unlabelled images of its own into the model's statistics. The
    rule leaves sites alone whose distance from the federation their class mix explains."""

    images: str = f"1,4,16,64,{ALL}"
    prior: float = PRIOR

    title = "Accuracy after calibration to each site"
    paper = "class mix: Saerens et al., 2002"

    def __post_init__(self) -> None:
        self.counts = {name: 0 if name == ALL else int(name) if name.isdigit() else -1 for name in names(self.images)}
        if not self.counts or min(self.counts.values()) < 0:
            raise FedkeelError(f"'images' is '{self.images}': give numbers of images, or '{ALL}', with commas.")

    def measure(self, snapshot: Snapshot) -> Values:
        federation = snapshot.federation
        clients = [*some_clients(federation, snapshot.worker.config.seed), *federation.unseen]
        found: dict[str, list[dict[str, float]]] = {}  # by domain, of each client
        sites: dict[str, dict[str, float]] = {}
        for client in (client for client in clients if len(client.test)):
            accuracies, sites[client.name] = self._of(client, snapshot)
            found.setdefault(client.domain, []).append(accuracies)
        domains = {
            domain: {name: fmean(each[name] for each in group) for name in group[0]} for domain, group in found.items()
        }
        trained = [domain for domain in domains if domain not in snapshot.held_out] or list(domains)
        held_out = [domain for domain in domains if domain not in trained]
        averages = {"average": trained} | ({UNSEEN: held_out} if held_out else {})
        means = {
            what: {name: fmean(domains[domain][name] for domain in group) for name in domains[group[0]]}
            for what, group in averages.items()
        }
        return {"domains": domains, "sites": sites, **means}

    def _of(self, client: Client, snapshot: Snapshot) -> tuple[dict[str, float], dict[str, float]]:
        """Accuracies of one client, and what the last calibration by the rule saw of it."""
        evaluator = snapshot.worker.evaluator
        stranger = snapshot.worker.method.is_stranger(snapshot.kept(client.name))
        seen: dict[str, float] = {}

        def accuracy(count: int | None, prior: float = 0.0, *, always: bool = True) -> float:
            snapshot.put_global(client)
            tested, statistics = client, "batch" if stranger else "global"
            if count is not None:
                tested, record = evaluator.calibrate(client, count, prior, always=always)
                statistics = "global"
                if not always:
                    keys = ("images", "distance", "explained", "share")
                    seen.update({key: getattr(record, key) for key in keys})
            (result,) = evaluator.evaluate(tested, ["test"], statistics)
            return result.accuracy

        accuracies = {AS_IT_IS: accuracy(None)}
        for name, count in self.counts.items():
            own = accuracy(count)
            accuracies |= {
                f"rule {name}": own if stranger else accuracy(count, self.prior, always=False),
                f"prior {name}": own if stranger else accuracy(count, self.prior),
                f"own {name}": own,
            }
        return accuracies, seen

    def figures(self, measured: list[Measured]) -> list[Figure]:
        values, label = measured[-1].values, "accuracy (0 to 1)"
        averages = {what: values[what] for what in ("average", UNSEEN) if what in values}
        # As they were measured, which may have been with other options.
        steps = [name.partition(" ")[2] for name in values["average"] if name.startswith("rule ")]
        largest = max(int(site.get("images", 0)) for site in values["sites"].values())
        x = [0, *(largest if step == ALL else int(step) for step in steps)]
        figures = [
            lines(
                f"{'Unseen domains' if what == UNSEEN else 'Average over the domains'}, {measured[-1]}",
                "images of the site",
                label,
                {told: (x, [found[AS_IT_IS], *(found[f"{way} {n}"] for n in steps)]) for way, told in WAYS.items()},
                **({"numbers": {name: 100 * value for name, value in found.items()}} if what != UNSEEN else {}),
            )
            for what, found in averages.items()
        ]
        last = f"rule {steps[-1]}"
        by_domain = {
            told: {domain: found[name] for domain, found in values["domains"].items()}
            for told, name in ((AS_IT_IS, AS_IT_IS), ("calibrated by the rule", last))
        }
        each = {f"{d} {name}": 100 * value for d, found in values["domains"].items() for name, value in found.items()}
        figures.append(bars(f"By domain, {measured[-1]}", label, by_domain, "domain", numbers=each))
        rows = [
            [name, *(short(site[key]) for key in ("images", "distance", "explained", "share"))]
            for name, site in values["sites"].items()
            if site
        ]
        if rows:
            columns = ["site", "images", "squared distance", "explained", "share of its own"]
            figures.append(table("How far sites are from the federation", columns, rows))
        found = values["average"]
        return keyed(figures, "accuracy that calibration adds", found[last] - found[AS_IT_IS], "low", percent=True)
