"""What several methods need of the model beyond their `traits`, and refuse to go without before anything trains."""

from torch import nn

from fedkeel.core.types import Classifier
from fedkeel.errors import MethodError
from fedkeel.methods import Server


def need_head(method: str, model: nn.Module) -> Classifier:
    """The model, if it says what its head is."""
    if not isinstance(model, Classifier):
        raise MethodError(f"'{method}' needs to know the head of {type(model).__name__}: wrap it by `models.wrap`.")
    return model


def need_global_statistics(method: str, server: Server) -> None:
    """For methods that train with the server's statistics: another part may keep all of them on the clients."""
    if not any(name.endswith("running_mean") for name in server.layout.statistics):
        raise MethodError(
            f"'{method}' uses the global statistics of batch norm, and no layer has any that travel: choose a model "
            "whose batch norm keeps running statistics, and leave out what keeps them local."
        )
