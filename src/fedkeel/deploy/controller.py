"""The run, inside of a job at NVFlare's server: `control_flow` is the one round loop."""

from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedkeel.config import from_dict
from fedkeel.core import imports
from fedkeel.deploy.channel import NVFlareChannel
from fedkeel.deploy.kits import SETTINGS, read_json
from fedkeel.deploy.serving import Waiting, train
from fedkeel.errors import FedkeelError
from fedkeel.runs.progress import RunProgress
from fedkeel.stopping import Stopped

PROGRESS, FAILURE = "progress.log", "failure.txt"  # beside the settings: what 'fedkeel server' shows
TOGETHER = 60.0  # seconds that the sites of a job have to come up


class FedkeelController(Controller):
    """Its settings are `fedkeel.json` in the server's own `local/`: nothing that comes with a job changes them."""

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is left."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_warning(fl_ctx, f"The reply of '{client.name}' came too late and does not count.")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        local = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir())
        settings = read_json(local / SETTINGS)
        channel = NVFlareChannel(self, fl_ctx, abort_signal)
        sites = tuple(channel.sites())
        with open(local / PROGRESS, "a", encoding="utf-8", buffering=1) as stream:
            try:
                for one in settings["imports"]:
                    imports.load(one)
                with RunProgress(stream) as progress:
                    waiting = Waiting(len(sites), TOGETHER, tuple(settings["sites"]))
                    train(channel, from_dict(settings["config"]), settings["out"], waiting, progress)
            except Stopped:
                self.log_info(fl_ctx, "The run was stopped; the next job goes on from its checkpoint.")
            except FedkeelError as error:
                (local / FAILURE).write_text(str(error), encoding="utf-8")
                self.system_panic(str(error), fl_ctx)
