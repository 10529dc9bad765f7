"""What calibration gains, by the number of images that a site gives to it (docs/calibration.md)."""

from statistics import fmean

from fedkeel.analysis.diagnostic import Numbers, diagnostic
from fedkeel.analysis.snapshot import Snapshot, some_clients
from fedkeel.data.federation import Client
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import PRIOR

AS_IT_IS, ALL = "as it is", "all"
WAYS = {"rule": "by the rule", "prior": "by the prior alone", "own": "the site's moments alone"}


@diagnostic("calibration", paper="class mix: Saerens et al., 2002", better="high")
def calibration(run: Snapshot, *, images: str = f"1,4,16,64,{ALL}", prior: float = PRIOR) -> Numbers:
    """Accuracy after calibration to each site.

    Test accuracy when each site mixes the moments of n unlabelled images of its own into the model's statistics: by the
    rule, which leaves sites alone whose distance from the federation their class mix explains; by the prior alone; and
    with the site's moments in place of the federation's. Of a domain that never trained, test images take their place.
    """
    steps = [step.strip() for step in str(images).split(",")]
    if not all(step == ALL or (step.isdigit() and int(step)) for step in steps):
        raise FedkeelError(f"'images' is '{images}': give numbers of images, or '{ALL}', with commas.")
    found: dict[str, list[dict[str, float]]] = {}  # by domain, of each client
    for client in (*some_clients(run.federation, run.worker.config.seed), *run.federation.unseen):
        if len(client.test):
            found.setdefault(client.domain, []).append(of_client(run, client, steps, prior))
    domains = {domain: means(of_clients) for domain, of_clients in found.items()}
    trained = [domain for domain in domains if domain not in run.held_out] or list(domains)
    average = means([domains[domain] for domain in trained])
    unseen = [of for domain, of in domains.items() if domain not in trained]
    averages = {"average": average} | ({"unseen": means(unseen)} if unseen else {})
    curve = {
        told: {"0": average[AS_IT_IS]} | {step: average[f"{way} {step}"] for step in steps}
        for way, told in WAYS.items()
    }
    return {
        "accuracy that calibration adds (0 to 1)": average[f"rule {steps[-1]}"] - average[AS_IT_IS],
        "accuracy (0 to 1) by way and images of the site": curve,
        "accuracy (0 to 1) by domain and calibration": averages | domains,
    }


def of_client(run: Snapshot, client: Client, steps: list[str], prior: float) -> dict[str, float]:
    evaluator, stranger = run.worker.evaluator, run.put_global(client)

    def accuracy(step: str = "", prior: float = 0.0, *, always: bool = True) -> float:
        run.put_global(client)
        tested = client
        if step:
            tested, _ = evaluator.calibrate(client, 0 if step == ALL else int(step), prior, always=always)
        (result,) = evaluator.evaluate(tested, ["test"], "batch" if stranger and not step else "global")
        return result.accuracy

    found = {AS_IT_IS: accuracy()}
    for step in steps:
        own = accuracy(step)
        found[f"rule {step}"] = own if stranger else accuracy(step, prior, always=False)
        found[f"prior {step}"] = own if stranger else accuracy(step, prior)
        found[f"own {step}"] = own
    return found


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
