"""The round loop. There is one: executors differ, this does not.

sample clients -> broadcast -> train -> check -> weights, statistics, extras -> before_evaluation
-> evaluate -> record -> checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fedkeel import seeds
from fedkeel.config import from_one
from fedkeel.core import state
from fedkeel.core.evaluation import Evaluation, Scores, summarise
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update, check, check_samples, reading
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, prefixed, select
from fedkeel.engine import profile
from fedkeel.engine.checkpointing import Checkpoint, Pace, Storage
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.local import LOCAL, QUESTION, WATCHED
from fedkeel.engine.profile import phase
from fedkeel.engine.remarks import Remarks
from fedkeel.engine.setup import Setup, clients_per_round
from fedkeel.engine.testing import Tested
from fedkeel.errors import StoreError, TrainingError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.observer import Aggregated, Observer
from fedkeel.stopping import UPDATE, reached
from fedkeel.trust import privacy
from fedkeel.trust.secrets import Randomness


@dataclass
class Traffic:
    """Bytes between server and clients, and how many exchanges beside the training itself."""

    up: int = 0
    down: int = 0
    questions: int = 0


@dataclass
class Federated:
    """A run in progress."""

    setup: Setup
    executor: Executor
    store: Storage
    observer: Observer
    server: Server = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)
    best: tuple[float, int] = (-1.0, -1)  # validation accuracy and its round
    best_model: Tensors = field(default_factory=dict)
    best_local: Tensors = field(default_factory=dict)  # what clients kept of the model then, by "client/entry"

    def __post_init__(self) -> None:
        config, worker = self.setup.config, self.setup.worker
        self.config, self.method, self.federation = config, worker.method, worker.federation
        self.profile = self.setup.profile
        self.pace = Pace(config.checkpoint_every)
        self.server = Server(
            round=0,
            rounds=config.rounds,
            weights=worker.layout.extract(worker.model, worker.layout.weights),
            statistics=worker.layout.extract(worker.model, worker.layout.statistics),
            participants=[],
            num_clients=len(self.federation.clients),
            layout=worker.layout,
            config=config,
            asker=self._ask,
            network=worker.model,
        )
        self.server.extras = {}
        self.tested = self._who_is_tested()
        self.remarks = Remarks(lambda text: self.observer.note(text))

    def _who_is_tested(self) -> Tested:
        return Tested(self.config, self.federation, self.method, self.executor, lambda text: self.observer.note(text))

    # -- the loop --------------------------------------------------------------------------------------------
    def run(self) -> Server:
        """Run the rounds that are left and return the server whose model is the result."""
        first = self._restore()
        self.observer.started(self.config, first)
        self.remarks.of_lacking(self.setup)
        self.profile.go_on(self.store.directory, first)
        result = self.server
        for round in range(first, self.config.rounds):
            with self.profile.round(round):
                result = self.round(round)
            self.profile.save(self.store.directory, now=False)
        return result

    def round(self, round: int) -> Server:
        began = time.perf_counter()
        server, config = self.server, self.config
        self.traffic = Traffic()
        self._welcome()
        server.round, server.participants = round, self._sample(round)
        with self.profile(profile.BROADCAST):
            self.method.before_training(server)
            broadcast = self._broadcast(server, self.method.send(server, server.weights))
        before = {client: self.executor.memory.of(client) for client in server.participants}
        updates, dropped = self._collect(broadcast, before)
        trained = time.perf_counter()
        if config.dp == "central":
            self._aggregate_privately(broadcast, updates)
        elif len(updates) >= config.min_clients:
            self._aggregate(self._defend(broadcast, updates, before))
        else:
            self.observer.note(
                f"Round {from_one(round)} had {len(updates)} usable updates, fewer than 'min_clients' "
                f"({config.min_clients}): the global model is unchanged."
            )
            for client in server.participants:
                self.executor.memory.keep(client, before[client])
        aggregated = time.perf_counter()
        last = round == config.rounds - 1
        tested, scores = server, None
        if config.evaluates(round):
            tested = self._before_evaluation(server)
            scores = self._evaluate(tested)
        loss = _mean_loss(updates)
        epsilon = privacy.spent(config, round + 1, self._sizes)
        self._record(
            {
                "kind": "round",
                "round": round,
                "clients": len(updates),
                "dropped": len(dropped),
                "loss": loss,
                "learning_rate": config.learning_rate_at(round),
                "bytes_up": self.traffic.up,
                "bytes_down": self.traffic.down,
                "questions": self.traffic.questions,
            }
            | ({"epsilon": epsilon, "randomness": self.setup.noise_from()} if epsilon is not None else {})
        )
        self.store.append_timing(
            {
                "round": round,
                "train": trained - began,
                "aggregate": aggregated - trained,
                "evaluate": time.perf_counter() - aggregated,
            }
        )
        self._tell(broadcast, updates, tested)
        if last or self.pace.is_due(round):
            self.pace.write(lambda: self._checkpoint(tested if last else server, round))
        self.observer.round_done(round, config.rounds, scores, loss)
        return tested

    def _welcome(self) -> None:
        """From this round on, count those who came since the last one."""
        grown = self.setup.grown()
        if grown is None:
            return
        self.federation = self.setup.worker.federation = grown
        self.setup.held_out = list(dict.fromkeys(client.domain for client in grown.unseen))
        self.setup.domains = grown.domains
        self.server.num_clients = len(grown.clients)
        self.__dict__.pop("_sizes", None)
        self.tested = self._who_is_tested()
        self.remarks.of_lacking(self.setup)

    @phase(profile.SAMPLING)
    def _sample(self, round: int) -> list[str]:
        """The clients of this round, in the federation's order."""
        clients = self.federation.clients
        if self.config.dp == "central":
            return [clients[i].name for i in privacy.takes_part(self.config, len(clients), round, self._randomness)]
        count = clients_per_round(self.config, len(clients))
        if count >= len(clients):
            return [client.name for client in clients]
        chosen = seeds.sample(len(clients), count, seeds.generator(self.config.seed, "participation", round))
        return [clients[i].name for i in sorted(chosen)]

    @cached_property
    def _sizes(self) -> set[int]:
        """Of the clients' data, where the account of privacy needs them: there may be a great many clients."""
        return {client.samples for client in self.federation.clients} if self.config.dp == "local" else set()

    @property
    def _randomness(self) -> Randomness:
        return self.setup.worker.randomness

    def _broadcast(self, server: Server, weights: Tensors) -> Broadcast:
        return Broadcast(server.round, server.rounds, weights, server.statistics, server.extras)

    @phase(profile.COLLECTION)
    def _collect(self, broadcast: Broadcast, before: Mapping[str, Tensors]) -> tuple[list[Update], list[Missing]]:
        """Train the round's clients; keep the updates that pass the check, in the clients' order.

        `before`: what each of them remembers until then.
        """
        participants, number = self.server.participants, from_one(broadcast.round)
        self.traffic.down += broadcast.nbytes * len(participants)
        updates: list[Update] = []
        dropped: list[Missing] = []
        results = self.profile.over(profile.TRAINING, self.executor.train(participants, broadcast))
        for client, result in zip(participants, results, strict=True):
            problem = result.reason if isinstance(result, Missing) else ""
            if isinstance(result, Update):
                self.traffic.up += result.nbytes
                try:
                    with reading("it cannot be checked"):
                        _check_sender(result, client)
                        check(result, broadcast)
                        self.method.check_extras(self.server, result.extras)
                except BadMessage as bad:
                    problem = str(bad)
                else:
                    updates.append(result)
                    record = {"kind": "client", "round": broadcast.round, "client": client, "samples": result.samples}
                    metrics = {name: n for name, n in result.metrics.items() if not name.startswith(WATCHED)}
                    self._record(record | metrics | record)  # a metric cannot pose as something else
                    reached(UPDATE)
            if problem:
                dropped.append(Missing(client, problem))
                # What the server does not know of must not have happened: SCAFFOLD's control variates, for one, are
                # kept on both sides and would no longer fit each other.
                self.executor.memory.keep(client, before[client])
                self._record({"kind": "dropped", "round": broadcast.round, "client": client, "reason": problem})
                self.observer.note(f"Round {number}: the update of '{client}' is dropped, {problem}.")
            self.observer.client_done(broadcast.round, len(updates) + len(dropped), len(participants))
        if dropped and not updates:
            raise TrainingError(
                f"No client had a usable update in round {number}; the last: '{dropped[-1].client}', "
                f"{dropped[-1].reason}."
            )
        return updates, dropped

    @phase(profile.AGGREGATION, calls=0)
    def _defend(self, broadcast: Broadcast, updates: list[Update], before: Mapping[str, Tensors]) -> list[Update]:
        """What the robust rules leave of the updates. One that is not chosen is as if it had not come."""
        chosen = self.setup.defence.select(broadcast, updates)
        names = {update.client for update in chosen}
        for update in updates:
            if update.client not in names:
                self.executor.memory.keep(update.client, before[update.client])
                self._record({"kind": "not chosen", "round": broadcast.round, "client": update.client})
        self.server.participants = [update.client for update in chosen]  # whom methods ask before the test
        return chosen

    @phase(profile.AGGREGATION)
    def _aggregate(self, updates: Sequence[Update]) -> None:
        server = self.server
        shares = self.method.shares(server, updates, [server.share(update) for update in updates])
        mean = self.setup.defence.mean
        weights = mean([update.weights for update in updates], shares)
        statistics = mean([update.statistics for update in updates], shares)
        self._apply(updates, weights, statistics)

    @phase(profile.AGGREGATION)
    def _aggregate_privately(self, broadcast: Broadcast, updates: list[Update]) -> None:
        """Of the weights only the noisy mean is seen by any rule; nobody's update still makes noise."""
        server = self.server
        weights = privacy.noisy_mean(
            self.config, broadcast.weights, updates, server.num_clients, server.round, self._randomness
        )
        updates = [replace(update, weights={}) for update in updates]
        if updates:
            self._apply(updates, weights, weighted_mean([u.statistics for u in updates], [1.0] * len(updates)))
        else:
            server.weights = self.method.weights(server, [], weights)

    def _apply(self, updates: Sequence[Update], weights: Tensors, statistics: Tensors) -> None:
        """The method's own rules."""
        server = self.server
        weights = self.method.weights(server, updates, weights)
        statistics = self.method.statistics(server, updates, statistics)
        extras = self.method.extras(server, updates)
        server.weights, server.statistics = weights, state.keep_variances_positive(statistics)
        server.extras = extras

    # -- questions of methods --------------------------------------------------------------------------------
    @phase(profile.QUESTIONS)
    def _ask(self, server: Server, clients: Sequence[str], question: str, tensors: Tensors) -> dict[str, Answer]:
        extras = self.server.extras | prefixed(tensors, QUESTION)
        broadcast = Broadcast(server.round, server.rounds, server.weights, server.statistics, extras)
        self.traffic.questions += 1
        self.traffic.down += broadcast.nbytes * len(clients)
        answers: dict[str, Answer] = {}
        for client, result in zip(clients, self.executor.ask(clients, broadcast, question), strict=True):
            problem = result.reason if isinstance(result, Missing) else ""
            if isinstance(result, Answer):
                self.traffic.up += result.nbytes
                try:
                    with reading("it cannot be checked"):
                        _check_sender(result, client)
                        check_samples(result.samples)
                        self.method.check_answer(server, question, result.tensors)
                except BadMessage as bad:
                    problem = str(bad)
                else:
                    answers[client] = result
            if problem:
                number = from_one(server.round)
                self.observer.note(f"Round {number}: '{client}' did not answer '{question}', {problem}.")
        return answers

    # -- evaluation ------------------------------------------------------------------------------------------
    @phase(profile.EVALUATION, calls=0)
    def _before_evaluation(self, server: Server) -> Server:
        """A copy of the server whose model is the one to be tested."""
        tested = replace(server, statistics=dict(server.statistics), weights=dict(server.weights))
        self.method.before_evaluation(tested)
        tested.statistics = state.keep_variances_positive(tested.statistics)
        server.memory = tested.memory
        return tested

    @phase(profile.EVALUATION)
    def _evaluate(self, server: Server) -> Scores | None:
        broadcast = self._broadcast(server, server.weights)
        evaluations = self.tested.evaluate(broadcast)
        self.remarks.of_diverged(server.round, evaluations)
        kinds = {e.statistics for e in evaluations}
        reported = "global" if "global" in kinds else "batch"
        shown: Scores | None = None
        for split, statistics in sorted({(e.split, e.statistics) for e in evaluations}, reverse=True):
            chosen = [e for e in evaluations if (e.split, e.statistics) == (split, statistics)]
            scores = summarise(chosen, self.setup.held_out)
            for e in chosen:
                self._record({"kind": "evaluation", "round": server.round} | _evaluation_record(e))
            self._record(
                {"kind": "scores", "round": server.round, "split": split, "statistics": statistics} | vars(scores)
            )
            if split == "test" and statistics == reported:
                shown = scores
            if split == "validation" and statistics == reported and scores.average > self.best[0]:
                self.best = (scores.average, server.round)
                if self.config.result == "best-validation":
                    self.best_model = {**server.weights, **server.statistics}
                    self.best_local = self._personal_layers()
        return shown

    @phase(profile.RECORDING)
    def _record(self, record: dict[str, Any]) -> None:
        self.store.append(record)

    @phase(profile.RECORDING, calls=0)
    def _tell(self, sent: Broadcast, updates: Sequence[Update], tested: Server) -> None:
        model = self._broadcast(tested, tested.weights)
        self.observer.aggregated(Aggregated(sent, updates, model, self.executor.memory))

    # -- stopping and going on -------------------------------------------------------------------------------
    @phase(profile.CHECKPOINT)
    def _checkpoint(self, server: Server, round: int) -> None:
        groups = {
            "weights": server.weights,
            "statistics": server.statistics,
            "extras": server.extras,
            "memory": server.memory,
            "best": self.best_model,
            "best_local": self.best_local,
        }
        best = {"accuracy": self.best[0], "round": self.best[1]}
        self.executor.memory.shelve()
        self.store.checkpoint(Checkpoint(round, groups, best))

    def _restore(self) -> int:
        """Load the last good checkpoint; returns the round to begin with."""
        checkpoint = self.store.latest(self.observer.note)
        if checkpoint is None:
            self.store.truncate()
            return 0
        groups, device = checkpoint.groups, self.setup.worker.device
        for kind, expected in (("weights", self.server.weights), ("statistics", self.server.statistics)):
            stored = {name: tensor.shape for name, tensor in groups.get(kind, {}).items()}
            if stored != {name: tensor.shape for name, tensor in expected.items()}:
                raise StoreError(
                    f"The checkpoints of '{self.store.directory}' are of another model than the one given: "
                    "resume with the model and the method that the run began with."
                )
        self.server.weights = state.to_device(groups.get("weights", {}), device)
        self.server.statistics = state.to_device(groups.get("statistics", {}), device)
        self.server.extras = state.to_device(groups.get("extras", {}), device)
        self.server.memory = state.to_device(groups.get("memory", {}), device)
        self.best_model, self.best_local = groups.get("best", {}), groups.get("best_local", {})
        self.best = (checkpoint.best["accuracy"], int(checkpoint.best["round"]))
        return checkpoint.round + 1

    def local_tensors(self) -> Iterator[tuple[str, Tensors]]:
        """What each client keeps of the model that is the result, one client at a time, for saving personal models."""
        if self.best_local:
            by_client: dict[str, Tensors] = {}
            for name, tensor in self.best_local.items():
                client, _, entry = name.rpartition("/")
                by_client.setdefault(client, {})[entry] = tensor
            yield from by_client.items()
            return
        for name, memory in self.executor.memory.items():
            if local := select(memory, LOCAL):
                yield name, local

    def _personal_layers(self) -> Tensors:
        """Of all clients at this moment: the model of the best round goes with the layers of that round."""
        if not self.method.is_personal:
            return {}
        kept = ((name, select(memory, LOCAL)) for name, memory in self.executor.memory.items())
        return {f"{name}/{entry}": tensor.clone() for name, local in kept for entry, tensor in local.items()}


def _check_sender(message: Update | Answer, client: str) -> None:
    if message.client != client:
        raise BadMessage(f"it says that it is of '{message.client}'")


def _mean_loss(updates: Sequence[Update]) -> float:
    told = [update for update in updates if "loss" in update.metrics]
    total = sum(update.samples for update in told)
    return sum(update.metrics["loss"] * update.samples for update in told) / total if told else float("nan")


def _evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "client": evaluation.client,
        "domain": evaluation.domain,
        "split": evaluation.split,
        "statistics": evaluation.statistics,
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "samples": evaluation.samples,
    }
