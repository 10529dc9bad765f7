"""A real federation: a server, and sites that keep their images.

The round loop is the one that runs everywhere (`engine.rounds`); its executor (`engine.executors.sites`) sends
Broadcasts over a channel, and a site answers with Updates.

    site.py         a site: its images, what it remembers between rounds, what it replies to a request
    policy.py       what a site lets a server ask of it, by `requests`
    site_models.py  what a site keeps of a run for itself
    serving.py      a run: the sites that come, then the rounds
    channel.py      requests and replies as NVFlare's tasks
    controller.py   the run inside of a job at NVFlare's server; `executor.py`, the site in the same job
    kits.py         what the server and each site need to trust each other, and how strict they are
    jobs.py         `fedkeel server` and `fedkeel join`: NVFlare's `processes`, one job after another
    flower.py       the same as a Flower app, for those who have a Flower federation
"""

import importlib.util

from fedkeel.errors import FedkeelError


def need_nvflare() -> None:
    """One sentence where the extra is missing."""
    if importlib.util.find_spec("nvflare") is None:
        raise FedkeelError("A federation over a network runs on NVFlare: pip install 'fedkeel[nvflare]'.")
