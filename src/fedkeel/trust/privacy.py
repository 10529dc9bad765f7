"""Differential privacy, of clients against whoever sees the model, or of samples against the server.

`central`: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018. The server is
trusted. Clients take part independently of each other with probability q, the change of each is clipped to the norm S,
and the sum gets Gaussian noise before anything else sees it:

    w <- w + 1/(q N) (sum_{i in C_t} clip_S(w_i - w) + z S N(0, I))

so that the presence of a client, with all its samples, is hidden. Divided is by the expected number of clients: the
real one would tell. A round that draws nobody adds noise too.

`local`: DP-SGD, Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. The server is not trusted. In each
local step a sample takes part with probability q = B/n, the gradient of each is clipped to the norm S, and

    g = 1/B (sum_{x in L_t} clip_S(g_x) + z S N(0, I))

so that the presence of a sample in a client's data is hidden from the server. Gradients of single samples come from
`torch.func`; Opacus' module that hooks into each kind of layer does not know FedWon's.

In both, each step is a sampled Gaussian mechanism with rate q and noise multiplier z. Opacus' accountant composes them
by Renyi differential privacy (Mironov et al. 2019): (epsilon, delta) for adding or removing one client, or sample.

Noise, and who or what takes part, come from the run's seed in a simulation, so that it can be repeated, and whoever
knows the seed can take the noise away again. Over a network everybody is told the seed: there they come from the
system's randomness (`secret`), and a step that is done twice has noise of its own each time, and counts twice.
"""

import hashlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedkeel.config import Config
from fedkeel.core.client import Batch, TaskLoss, cross_entropy
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.server import Server
from fedkeel.core.state import Layout, Tensors, batch_norms
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.seeds import Stream
from fedkeel.spec import parse
from fedkeel.trust.rules import Mean, MeanAggregator, PlainGradients, Rules, UniformSampler

__all__ = ["composed", "epsilon"]

log = logging.getLogger("fedkeel")


# -- the account ------------------------------------------------------------------------------------------------------
def require_accountant() -> None:
    try:
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise FedkeelError(
            f"'dp' needs {error.name} to count epsilon, which is not installed: 'pip install fedkeel[privacy]'."
        ) from None


@lru_cache(maxsize=4096)
def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Of `steps` sampled Gaussian mechanisms of this noise multiplier and sampling rate: see `composed`."""
    return composed([(noise, rate, steps)], delta)


def composed(history: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Epsilon of several of these one after another: noise multiplier, sampling rate and steps of each.

    No example here, since it needs `fedkeel[privacy]`: `composed([(1.0, 0.1, 100), (2.0, 0.1, 50)], delta=1e-5)`.
    """
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    # With next to no noise, sampling hides nothing either, and Opacus' series for it do not end.
    plain = [(min(max(noise, 1e-100), 1e100), rate if noise > 1e-3 else 1.0, steps) for noise, rate, steps in history]
    accountant.history = plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the largest one tried: epsilon is then a bound
        return float(accountant.get_epsilon(delta))


def spent(config: Config, rounds: int, samples: Collection[int]) -> float | None:
    """Epsilon after so many rounds; None without differential privacy. `samples`: how many clients have.

    Of `local` it is that of the client with the most, had it taken part in every round.
    """
    if config.dp == "central":
        return epsilon(config.dp_noise, config.participation, rounds, config.dp_delta)
    if config.dp == "local":
        return max(
            epsilon(config.dp_noise, rate, steps * rounds, config.dp_delta)
            for rate, steps in {(sampling_rate(config, n), local_steps(config, n)) for n in samples}
        )
    return None


def sampling_rate(config: Config, samples: int) -> float:
    return min(1.0, config.batch_size / samples)


def local_steps(config: Config, samples: int) -> int:
    return config.local_steps or config.local_epochs * math.ceil(samples / config.batch_size)


# -- what it can go with ----------------------------------------------------------------------------------------------
def refuse_contradictions(config: Config, method: Composition) -> None:
    """Before anything is read."""
    if config.dp == "none":
        return
    require_accountant()
    refuse_what_tells_more(config, method)
    if config.dp == "local":
        return
    if config.weighting != "uniform" or config.robust or config.min_clients > 1:
        raise FedkeelError(
            "'dp=central' adds noise to the mean of equal clients, however many came: give '--weighting uniform', and "
            "leave out 'robust' and 'min_clients'."
        )
    for part in method.parts:
        looks = part.overrides("weights") and "central" not in part.traits.private
        if {"clients", "shares"} & {*part.traits.replaces} or looks:
            raise MethodError(
                f"'dp=central' adds noise to the mean of equal clients, and '{part.name}' does not go by that alone: "
                "choose another method."
            )


def refuse_what_tells_more(config: Config, method: Composition) -> None:
    """Under `local`, what a client would send that its noisy gradients do not cover."""
    if config.dp != "local":
        return
    if "balanced" in parse(config.loss).options.values():
        raise FedkeelError(
            "'dp=local' hides a sample's own gradient, and weights 'balanced' by it change the others' too: give the "
            "weights as numbers."
        )
    for part in method.parts:
        if "local" not in part.traits.private:
            raise MethodError(
                f"'dp=local' covers gradients of the loss and the weights they lead to, and '{part.name}' "
                "computes or sends something else from the samples: choose 'gn', 'ln', 'fedwon' or 'fedfn', alone "
                "or with 'fedavgm' or 'fedadam'."
            )


def refuse_network(config: Config, network: nn.Module) -> None:
    if config.dp == "local" and batch_norms(network):
        raise MethodError(
            "'dp=local' needs gradients of single samples, and batch norm mixes those of a batch: choose 'gn', 'ln', "
            "'fedwon' or 'fedfn', or a network without it."
        )


def warn_of_the_rest(config: Config, method: Composition, layout: Layout) -> None:
    """Epsilon speaks of the weights; say what else leaves the clients."""
    if config.dp != "central":
        return
    sends = [part.name for part in method.parts if part.overrides("finish") or part.overrides("answer")]
    if layout.statistics or sends:
        log.warning("Epsilon is that of the weights: statistics and what methods send beside get no noise.")


# -- what the loop is given -------------------------------------------------------------------------------------------
def choose_rules(config: Config, *, secret: bool = False) -> Rules:
    """The sampler, the gradients and the aggregator of a run, private or ordinary."""
    central = config.dp == "central"
    return Rules(
        (PoissonSampler if central else UniformSampler)(config, secret),
        (NoisyGradients if config.dp == "local" else PlainGradients)(config, secret),
        (NoisyAggregator if central else MeanAggregator)(config, secret),
    )


def private_stream(config: Config, secret: bool, *purpose: object) -> Stream:
    """Numbers for one purpose that others must not know: of the run's seed, or of the system, other ones each time."""
    text = "\x1f".join(map(str, ("privacy", config.seed, *purpose)))
    return Stream(os.urandom(32) if secret else hashlib.blake2b(text.encode(), digest_size=32).digest())


# -- central ----------------------------------------------------------------------------------------------------------
class PoissonSampler(UniformSampler):
    """Each client takes part independently of the others, with the probability `participation`."""

    def sample(self, clients: int, round: int) -> list[int]:
        if self.config.participation >= 1:
            return list(range(clients))
        drawn = private_stream(self.config, self.secret, "participation", round).uniform(clients)
        return (drawn < self.config.participation).nonzero().flatten().tolist()


class NoisyAggregator(MeanAggregator):
    """Of the weights only the noisy mean is seen by any rule; nobody's update still makes noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fewest = 0  # a round that draws nobody counts

    def mean(self, server: Server, broadcast: Broadcast, updates: Sequence[Update]) -> Mean:
        stream = private_stream(self.config, self.secret, "noise", server.round)
        weights = noisy_mean(self.config, broadcast.weights, updates, server.num_clients, stream)
        statistics = [update.statistics for update in updates]
        mean = weighted_mean(statistics, [1.0] * len(updates)) if updates else server.statistics
        return weights, mean, [replace(update, weights={}) for update in updates]


def noisy_mean(config: Config, origin: Tensors, updates: Sequence[Update], clients: int, stream: Stream) -> Tensors:
    """The weights that the clipped changes of these updates lead to, with noise. `clients`: of the whole federation."""
    totals = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in origin.items()}
    for update in updates:
        change = {name: update.weights[name].double() - tensor.double() for name, tensor in origin.items()}
        scale = clip_factor(torch.stack([tensor.square().sum() for tensor in change.values()]).sum(), config.dp_clip)
        for name, tensor in change.items():
            totals[name] += scale * tensor
    expected = config.participation * clients
    result: Tensors = {}
    for name, tensor in origin.items():
        noise = stream.normal(*tensor.shape).double().to(tensor.device)
        mean = (totals[name] + config.dp_noise * config.dp_clip * noise) / expected
        result[name] = (tensor.double() + mean).to(tensor.dtype)
    return result


def clip_factor(square_norm: Tensor, clip: float) -> Tensor:
    """min(1, clip / norm)."""
    return (clip / square_norm.sqrt().clamp_min(1e-12)).clamp(max=1.0)


# -- local ------------------------------------------------------------------------------------------------------------
class NoisyGradients(PlainGradients):
    """DP-SGD: each sample is in a step independently of the others, its gradient is clipped, and the sum gets noise."""

    tells_loss = False

    def begin(self, client: str, round: int) -> None:
        self._noise = private_stream(self.config, self.secret, "noise", round, client)

    def batches(self, client: str, round: int, samples: int, draws: int) -> tuple[Tensor, list[int], Tensor]:
        order = private_stream(self.config, self.secret, "order", round, client)
        rate = sampling_rate(self.config, samples)
        steps = [(order.uniform(samples) < rate).nonzero().flatten() for _ in range(local_steps(self.config, samples))]
        sizes = list(map(len, steps))
        return torch.cat(steps), sizes, order.uniform(sum(sizes), draws)

    def backward(self, plain: Callable[[], Tensor], model: nn.Module, batch: Batch, task_loss: TaskLoss) -> Tensor:
        return noisy_backward(self.config, self._noise, model, batch, task_loss)


def noisy_backward(
    config: Config, stream: Stream, model: nn.Module, batch: Batch, task_loss: TaskLoss = cross_entropy
) -> Tensor:
    """Puts the noisy gradient where the optimizer looks for it; returns the mean loss, which is not private."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if len(batch.y):
        gradients, losses = sample_gradients(model, *batch, task_loss)
        # A server may send weights under which the gradient of some samples overflows: that must not show either.
        gradients = {name: g.nan_to_num(0.0, 0.0, 0.0) for name, g in gradients.items()}
        squares = torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients.values()]).sum(dim=0)
        scales = clip_factor(squares, config.dp_clip)
        sums = {name: torch.einsum("n,n...->...", scales, g) for name, g in gradients.items()}
        loss = losses.mean()
    else:  # nobody was drawn; the noise must not tell
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        loss = torch.zeros((), device=batch.x.device)
    for name, parameter in parameters.items():
        noise = stream.normal(*parameter.shape).to(parameter)
        parameter.grad = (sums[name] + config.dp_noise * config.dp_clip * noise) / config.batch_size
    return loss


def sample_gradients(
    model: nn.Module, x: Tensor, y: Tensor, task_loss: TaskLoss = cross_entropy
) -> tuple[Tensors, Tensor]:
    """The gradient of the loss of each sample by each trained parameter, (N, ...), and the losses, (N,)."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of(parameters: Tensors, one_x: Tensor, one_y: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, parameters, (one_x[None],)).logits
        return task_loss(logits, one_y[None])

    each: Callable[..., tuple[Tensors, Tensor]] = vmap(
        grad_and_value(loss_of), in_dims=(None, 0, 0), randomness="different"
    )
    return each(parameters, x.contiguous(), y)
