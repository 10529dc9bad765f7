"""Test images with what the model says of them, right and wrong. Only on request: they may be patients."""

import base64
import io
from html import escape

import torch
from PIL import Image
from torch import Tensor

from fedkeel import seeds
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.executors.sites.roster import Roster
from fedkeel.engine.setup import load_federation
from fedkeel.errors import FedkeelError
from fedkeel.report.collect import Group, Member
from fedkeel.runs.origin import data_from_afar
from fedkeel.runs.run import given_in_python
from fedkeel.runs.trained import Trained

LOOKED_AT = 512  # images of a site
MOST_SITES = 12
LARGEST = 160  # pixels of an image on the page


def examples(group: Group, number: int) -> str:
    """Of the best method's first seed: at each site so many that are right, and so many that are wrong."""
    member = shown(group)
    run, federation = member.run, data_of(member)
    personal = (run.directory / "personal").exists()
    parts = [
        f'<p class="what">By {escape(str(member))}: of each site the first {number} that are right and that are wrong, '
        f"in an order drawn at random.</p>"
    ]
    for client in [*federation.one_of_each(unseen=False), *federation.unseen][:MOST_SITES]:
        if len(client.test):
            trained = run.trained(client.name if personal else None)
            parts.append(f"<h4>{escape(client.domain)}</h4>" + of_site(trained, federation, client, number))
    return "".join(parts)


def shown(group: Group) -> Member:
    best = max(group.results.rows, key=lambda row: row.average.mean, default=None)
    finished = [member for member in group.members if member.summary and best and member.label == best.method]
    if not finished:
        raise FedkeelError("--images shows what a trained model says, and no run here is finished: leave it out.")
    return finished[0]


def data_of(member: Member) -> Federation:
    """The data themselves; one sentence where they are not here."""
    if given_in_python(member.config) or Roster.load(member.run.directory):
        raise FedkeelError(
            f"The data of {member} are not here to be shown (they were given in Python, or stay at their sites): leave "
            "--images out."
        )
    federation = data_from_afar(member.run.directory, member.config) or load_federation(member.config)
    if federation.images.dtype != torch.uint8 or federation.images.ndim != 4:
        raise FedkeelError(f"The data of {member} are not images that can be shown: leave --images out.")
    return federation


def of_site(trained: Trained, federation: Federation, client: Client, number: int) -> str:
    order = torch.randperm(len(client.test), generator=seeds.generator(0, "examples", client.name))[:LOOKED_AT]
    indices = client.test[order]
    said = trained.predict(federation.images[indices])
    found: dict[bool, list[str]] = {True: [], False: []}
    truths = [federation.classes[label] for label in federation.labels[indices].tolist()]
    for image, truth, name, sure in zip(federation.images[indices], truths, said.classes, said.confidence, strict=True):
        if len(found[truth == name]) < number:
            found[truth == name].append(picture(image, truth, name, sure))
    groups = ((kind, "".join(found[is_right])) for kind, is_right in (("Right", True), ("Wrong", False)))
    return "".join(f'<h5>{kind}</h5><div class="examples">{body or "<p>None.</p>"}</div>' for kind, body in groups)


def picture(image: Tensor, truth: str, said: str, sure: float) -> str:
    pixels = image.permute(1, 2, 0).numpy()
    drawn, buffer = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels[..., :3]), io.BytesIO()
    drawn.thumbnail((LARGEST, LARGEST))
    drawn.save(buffer, "PNG")
    text = f"{truth}, {100 * sure:.0f} %" if truth == said else f"{truth}, taken for {said}, {100 * sure:.0f} %"
    source = base64.b64encode(buffer.getvalue()).decode()
    caption = f"<figcaption>{escape(text)}</figcaption>"
    return f'<figure><img src="data:image/png;base64,{source}" alt="{escape(text)}">{caption}</figure>'
