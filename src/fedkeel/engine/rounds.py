"""The round loop. There is one: executors differ, this does not.

sample -> broadcast -> train and check -> aggregate -> evaluate -> record -> checkpoint
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from fedkeel.config import from_one
from fedkeel.core import state
from fedkeel.core.checking import check, check_samples
from fedkeel.core.evaluation import Scores, summarise
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update, mean_loss, reading
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, prefixed
from fedkeel.engine.best import Best
from fedkeel.engine.checkpointing import Checkpoint, Storage
from fedkeel.engine.evaluation import FederatedEvaluation
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.local import QUESTION, WATCHED
from fedkeel.engine.metrics import selection
from fedkeel.engine.schedules import learning_rate_at
from fedkeel.engine.setup import Setup
from fedkeel.engine.tasks import Result, Task
from fedkeel.errors import StoreError, TrainingError
from fedkeel.observer import Aggregated, Observer
from fedkeel.stopping import UPDATE, reached

PHASES = ("train", "aggregate", "evaluate")  # whose seconds are noted
# Of a checkpoint: the server as it trained, and, of the last round, what was tested where that is something else.
SERVER_GROUPS = ("weights", "statistics", "extras", "memory")
TESTED_GROUPS = ("weights", "statistics", "extras")
TESTED = "tested-"
EVALUATION_FIELDS = ("client", "domain", "split", "statistics", "accuracy", "loss", "samples")


@dataclass
class Federated:
    """A run in progress."""

    setup: Setup
    executor: Executor
    store: Storage
    observer: Observer
    # Bytes between server and clients in this round, and how many exchanges beside the training itself.
    traffic: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        config, worker = self.setup.config, self.setup.worker
        self.config, self.method = config, worker.method
        self.server = Server(
            round=0,
            rounds=config.rounds,
            weights=worker.layout.extract(worker.model, worker.layout.weights),
            statistics=worker.layout.extract(worker.model, worker.layout.statistics),
            participants=[],
            num_clients=len(self.setup.federation.clients),
            layout=worker.layout,
            config=config,
            asker=self._ask,
            network=worker.model,
        )
        self.memory, self.best, self._value = self.store.memory, Best(config), selection(config)
        self.evaluation = FederatedEvaluation(self.setup, self.executor, self.memory, self.observer.note)
        self._preparing: Server | None = None  # what is about to be broadcast, while methods may ask of it

    # -- the loop --------------------------------------------------------------------------------------------
    def run(self) -> Server:
        """Run the rounds that are left; the server as it was tested after the last."""
        first, result = self._restore()
        self.observer.started(self.config, first)
        for round in range(first, self.config.rounds):
            result = self.round(round)
            if self._is_last(round):
                break
        return result

    def round(self, round: int) -> Server:
        """One round; the server as it was tested, or as it trained where no evaluation was due."""
        times = [time.perf_counter()]
        self._sample(round)
        broadcast = self._broadcast()
        results, dropped = self._train(broadcast)
        times.append(time.perf_counter())
        self._aggregate(broadcast, results)
        times.append(time.perf_counter())
        tested, scores = self._evaluate() if self.config.evaluates(round) else (self.server, None)
        times.append(time.perf_counter())
        updates = [result.outcome for result in results]
        self._record_round(updates, len(dropped))
        self._record_times(times, results)
        self.observer.aggregated(Aggregated(broadcast, updates, tested.broadcast(tested.weights), self.memory))
        last = self._is_last(round)
        if last or from_one(round) % self.config.checkpoint_every == 0:
            self._checkpoint(round, tested if last else self.server)
        self.observer.round_done(round, self.config.rounds, scores, mean_loss(updates))
        return tested

    def _is_last(self, round: int) -> bool:
        """Whether the run ends with it: as planned, or early. One that was extended has new patience then."""
        if self.best.is_over and from_one(round) in self.store.extended:
            self.best.waited = 0
        return self.best.is_over or from_one(round) == self.config.rounds

    # -- sample, broadcast -----------------------------------------------------------------------------------
    def _sample(self, round: int) -> None:
        """The clients of this round, in the federation's order."""
        server = self.server
        self.traffic = Counter(bytes_up=0, bytes_down=0, questions=0)
        clients = self.setup.federation.clients
        server.round = round
        server.participants = [clients[i].name for i in self.setup.rules.sampler.sample(len(clients), round)]

    def _broadcast(self) -> Broadcast:
        """What they are sent. A method may change it for them, and keep what it learns by asking."""
        server = self.server
        sent = self._preparing = replace(server, weights=dict(server.weights), shares={})
        self.method.before_training(sent)
        self._preparing = None
        server.extras, server.memory, server.shares = sent.extras, sent.memory, sent.shares
        return sent.broadcast(sent.weights)

    # -- train and check -------------------------------------------------------------------------------------
    def _train(self, broadcast: Broadcast) -> tuple[list[Result[Update]], list[Missing]]:
        """Train the round's clients; keep the updates that pass the check, in the clients' order."""
        number, results, dropped = from_one(broadcast.round), list[Result[Update]](), list[Missing]()
        for result in self._results([Task("train", name) for name in self.server.participants], broadcast, self.server):
            if isinstance(result, Missing):
                dropped.append(result)
                self._record("dropped", {"client": result.client, "reason": result.reason})
                self.observer.note(f"Round {number}: the update of '{result.client}' is dropped, {result.reason}.")
                continue
            results.append(result)
            known = {"client": result.client, "samples": result.outcome.samples}
            metrics = {name: n for name, n in result.outcome.metrics.items() if not name.startswith(WATCHED)}
            self._record("client", known | metrics | known)
            reached(UPDATE)
        if dropped and not results:
            raise TrainingError(
                f"No client had a usable update in round {number}; the last: '{dropped[-1].client}', "
                f"{dropped[-1].reason}."
            )
        return results, dropped

    def _ask(self, server: Server, clients: Sequence[str], question: str, tensors: Tensors) -> dict[str, Answer]:
        """A method's question in the midst of a round: the answers of those who gave a usable one."""
        extras = (self._preparing or self.server).extras | prefixed(tensors, QUESTION)
        broadcast = Broadcast(server.round, server.rounds, server.weights, server.statistics, extras)
        self.traffic["questions"] += 1
        answers: dict[str, Answer] = {}
        for result in self._results([Task("answer", name, question=question) for name in clients], broadcast, server):
            if isinstance(result, Missing):
                number = from_one(server.round)
                self.observer.note(f"Round {number}: '{result.client}' did not answer '{question}', {result.reason}.")
                continue
            self.memory.keep(result.client, result.memory)
            answers[result.client] = result.outcome
        return answers

    def _results(self, tasks: Sequence[Task], broadcast: Broadcast, server: Server) -> Iterator[Result[Any] | Missing]:
        """The results of these tasks that `server` can use, in the order of the tasks; of the others, why it cannot.

        Nothing that a client remembers has changed yet.
        """
        self.traffic["bytes_down"] += broadcast.nbytes * len(tasks)
        tasks = [replace(task, memory=self.memory.look(task.client)) for task in tasks]
        results: dict[str, Result[Any] | Missing] = {}
        for result in self.executor.map(tasks, broadcast):
            results[result.client] = result
            if tasks[0].do == "train":
                self.observer.client_done(broadcast.round, len(results), len(tasks))
        for task in tasks:
            result = results[task.client]
            yield result if isinstance(result, Missing) else self._checked(task, result, broadcast, server)

    def _checked(self, task: Task, result: Result[Any], broadcast: Broadcast, server: Server) -> Result[Any] | Missing:
        outcome = result.outcome
        self.traffic["bytes_up"] += outcome.nbytes  # also of what cannot be used
        try:
            with reading("it cannot be checked"):
                if outcome.client != result.client:
                    raise BadMessage(f"it says that it is of '{outcome.client}'")
                if isinstance(outcome, Update):
                    check(outcome, broadcast)
                    self.method.check_extras(server, outcome.extras)
                else:
                    check_samples(outcome.samples)
                    self.method.check_answer(server, task.question, outcome.tensors)
        except BadMessage as bad:
            return Missing(result.client, str(bad))
        return result

    # -- aggregate -------------------------------------------------------------------------------------------
    def _aggregate(self, broadcast: Broadcast, results: Sequence[Result[Update]]) -> None:
        """From updates to the next global model: those that count, their mean, then the method's own rules."""
        server, method, aggregator = self.server, self.method, self.setup.rules.aggregator
        if len(results) < aggregator.fewest:
            self.observer.note(
                f"Round {from_one(server.round)} had {len(results)} usable updates, fewer than 'min_clients' "
                f"({aggregator.fewest}): the global model is unchanged."
            )
            return
        counted = aggregator.select(broadcast, [result.outcome for result in results])
        server.participants = [update.client for update in counted]  # whom methods ask before the test
        names = set(server.participants)
        for result in results:
            # What a client remembers changes with what the server takes from it: SCAFFOLD's control variates, for one,
            # are kept on both sides and must fit each other.
            if result.client in names:
                self.memory.keep(result.client, result.memory)
            else:
                self._record("not chosen", {"client": result.client})
        weights, statistics, seen = aggregator.mean(server, broadcast, counted)
        weights = method.weights(server, seen, weights)
        extras = server.extras
        if seen:
            statistics = state.keep_variances_positive(method.statistics(server, seen, statistics))
            extras = method.extras(server, seen)
        server.weights, server.statistics, server.extras = weights, statistics, extras

    # -- evaluate --------------------------------------------------------------------------------------------
    def _evaluate(self) -> tuple[Server, Scores | None]:
        """Test a copy of the server that the method may change, and compare it with the best one before."""
        server, shown = self.server, None
        tested = replace(server, statistics=dict(server.statistics), weights=dict(server.weights))
        self.method.before_evaluation(tested)
        tested.statistics = state.keep_variances_positive(tested.statistics)
        server.memory = tested.memory
        evaluations = self.evaluation.evaluate(tested.broadcast(tested.weights))
        for split, statistics in sorted({(e.split, e.statistics) for e in evaluations}, reverse=True):
            group = [e for e in evaluations if (e.split, e.statistics) == (split, statistics)]
            scores = summarise(group, self.setup.held_out)
            for e in group:
                self._record("evaluation", e.metrics | {name: getattr(e, name) for name in EVALUATION_FIELDS})
            self._record("scores", {"split": split, "statistics": statistics} | scores.record())
            if statistics != self.config.statistics[0]:
                continue
            if split == "test":
                shown = scores
            elif self.best.see(tested.round, self._value(vars(scores))) and self.best.is_result:
                self.best.model = {**tested.weights, **tested.statistics}
                self.best.local = {client: state.clone(local) for client, local in self.local_layers()}
        self.best.count()
        return tested, shown

    # -- record ----------------------------------------------------------------------------------------------
    def _record(self, kind: str, record: dict[str, Any]) -> None:
        known = {"kind": kind, "round": self.server.round}  # a client's metric cannot pose as something else
        self.store.append(known | record | known)

    def _record_round(self, updates: Sequence[Update], dropped: int) -> None:
        round = self.server.round
        rate = learning_rate_at(self.config, round)
        known = {"clients": len(updates), "dropped": dropped, "loss": mean_loss(updates), "learning_rate": rate}
        self._record("round", {**known, **self.traffic, **self.setup.account(from_one(round))})

    def _record_times(self, times: Sequence[float], results: Sequence[Result[Update]]) -> None:
        phases = {name: end - begin for name, (begin, end) in zip(PHASES, pairwise(times), strict=True)}
        clients = {one.client: float(f"{one.seconds:.4f}") for one in results if one.seconds is not None}
        self.store.append_timing({"round": self.server.round, **phases, "clients": clients})

    # -- checkpoint ------------------------------------------------------------------------------------------
    def _checkpoint(self, round: int, tested: Server) -> None:
        groups = {name: getattr(self.server, name) for name in SERVER_GROUPS} | self.best.groups()
        if tested is not self.server and self.method.overrides("before_evaluation"):
            groups |= {f"{TESTED}{name}": getattr(tested, name) for name in TESTED_GROUPS}
        self.store.checkpoint(Checkpoint(round, groups, self.best.numbers()))

    def _restore(self) -> tuple[int, Server]:
        """Load the last good checkpoint; the round to begin with, and the server as it is, or was tested at the end."""
        checkpoint, server = self.store.latest(self.observer.note), self.server
        if checkpoint is None:
            self.store.truncate()
            return 0, server
        groups, device = checkpoint.groups, self.setup.worker.device
        for name in ("weights", "statistics"):
            stored, expected = (
                {entry: tensor.shape for entry, tensor in tensors.items()}
                for tensors in (groups.get(name, {}), getattr(server, name))
            )
            if stored != expected:
                raise StoreError(
                    f"The checkpoints of '{self.store.directory}' are of another model than the one given: "
                    "resume with the model and the method that the run began with."
                )
        server.round = checkpoint.round
        for name in SERVER_GROUPS:
            setattr(server, name, state.to_device(groups.get(name, {}), device))
        self.best.restore(checkpoint.best, groups)
        if not self._is_last(checkpoint.round):
            return from_one(checkpoint.round), server
        if self.method.overrides("before_evaluation"):
            tested = [state.to_device(groups.get(f"{TESTED}{name}", {}), device) for name in TESTED_GROUPS]
            server = replace(server, weights=tested[0], statistics=tested[1], extras=tested[2])
        return self.config.rounds, server

    def local_layers(self) -> Iterator[tuple[str, Tensors]]:
        """What each client keeps of the model now."""
        for name, memory in self.memory.items() if self.method.is_personal else ():
            if local := self.method.tested(memory):
                yield name, local
