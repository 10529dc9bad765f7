"""The round loop. There is one: executors differ, this does not.

sample clients -> broadcast -> train -> check -> weights, statistics, extras -> before_evaluation
-> evaluate -> record -> checkpoint
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedkeel.config import from_one
from fedkeel.core import state
from fedkeel.core.checking import check, check_samples
from fedkeel.core.evaluation import Scores, summarise
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update, mean_loss, reading
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, prefixed, select
from fedkeel.data.federation import Federation
from fedkeel.engine.checkpointing import TRAINED, Checkpoint, CheckpointSchedule, Storage
from fedkeel.engine.evaluation import FederatedEvaluation
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.local import LOCAL, QUESTION, WATCHED
from fedkeel.engine.metrics import selection
from fedkeel.engine.patience import Patience
from fedkeel.engine.schedules import learning_rate_at
from fedkeel.engine.setup import Setup
from fedkeel.engine.tasks import Result, Task
from fedkeel.errors import StoreError, TrainingError
from fedkeel.observer import Aggregated, Observer
from fedkeel.stopping import UPDATE, reached

SERVER_GROUPS = ("weights", "statistics", "extras", "memory")
EVALUATION_FIELDS = ("client", "domain", "split", "statistics", "accuracy", "loss", "samples")


@dataclass
class Federated:
    """A run in progress."""

    setup: Setup
    executor: Executor
    store: Storage
    observer: Observer
    server: Server = field(init=False)
    # Bytes between server and clients in this round, and how many exchanges beside the training itself.
    traffic: Counter[str] = field(default_factory=Counter)
    # In the validation; "accuracy" is what `select_by` names, the higher the better: a loss is turned round.
    best: dict[str, float] = field(default_factory=lambda: {"accuracy": -1.0, "round": -1})
    best_model: Tensors = field(default_factory=dict)
    best_local: dict[str, Tensors] = field(default_factory=dict)  # what clients kept of the model then

    def __post_init__(self) -> None:
        config, worker = self.setup.config, self.setup.worker
        self.config, self.method = config, worker.method
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
        self.schedule = CheckpointSchedule(config.checkpoint_every)
        self.patience = Patience(config.patience, config.min_delta)
        self.memory = self.store.memory
        self._preparing: Server | None = None  # what is about to be broadcast, while methods may ask of it
        self.evaluation = FederatedEvaluation(self.setup, self.executor, self.memory, self.observer.note)
        self.how_good = selection(config)

    @property
    def federation(self) -> Federation:
        return self.setup.federation

    # -- the loop --------------------------------------------------------------------------------------------
    def run(self) -> Server:
        """Run the rounds that are left and return the server whose model is the result."""
        first = self._restore()
        self.observer.started(self.config, first)
        self.evaluation.begin()
        result = self.server
        for round in range(first, self.config.rounds):
            result = self.round(round)
            if self._is_last(round):
                break
        return result

    def _is_last(self, round: int) -> bool:
        """Whether the run ends with it: as planned, or early. One that was extended has new patience then."""
        if self.patience.is_over and from_one(round) in self.store.extended:
            self.patience.kept["waited"] = 0
        return self.patience.is_over or from_one(round) == self.config.rounds

    def round(self, round: int) -> Server:
        server, config = self.server, self.config
        self.traffic, began = Counter(bytes_up=0, bytes_down=0, questions=0), time.perf_counter()
        server.round, server.participants = round, self._sample(round)
        sent = self._preparing = replace(server, weights=dict(server.weights), shares={})
        self.method.before_training(sent)
        self._preparing = None
        server.extras, server.memory, server.shares = sent.extras, sent.memory, sent.shares
        broadcast = sent.broadcast(sent.weights)
        results, dropped = self._train(broadcast)
        updates = [result.outcome for result in results]
        collected = time.perf_counter()
        self._aggregate(broadcast, results)
        aggregated = time.perf_counter()
        tested, scores = server, None
        if config.evaluates(round):
            tested = self._before_evaluation()
            scores = self._evaluate(tested)
            self.patience.see(self.best)
        loss = mean_loss(updates)
        self._record(
            "round",
            {
                "clients": len(updates),
                "dropped": len(dropped),
                "loss": loss,
                "learning_rate": learning_rate_at(config, round),
                **self.traffic,
                **self.setup.account(round + 1),
            },
        )
        times = {"train": collected - began, "aggregate": aggregated - collected}
        times |= {"evaluate": time.perf_counter() - aggregated}
        seconds = {one.client: float(f"{one.seconds:.4f}") for one in results if one.seconds is not None}
        self.store.append_timing({"round": round, **times, "clients": seconds})
        self._show(broadcast, updates, tested)
        last = self._is_last(round)
        if last or self.schedule.is_due(round):
            self.schedule.write(lambda: self._checkpoint(tested if last else server, round))
        self.observer.round_done(round, config.rounds, scores, loss)
        return tested

    def _sample(self, round: int) -> list[str]:
        """The clients of this round, those who just came among them, in the federation's order."""
        if self.setup.admit_newcomers():
            self.server.num_clients = len(self.federation.clients)
            self.evaluation.begin()
        clients = self.federation.clients
        return [clients[i].name for i in self.setup.rules.sampler.sample(len(clients), round)]

    def _train(self, broadcast: Broadcast) -> tuple[list[Result[Update]], list[Missing]]:
        """Train the round's clients; keep the updates that pass the check, in the clients' order."""
        participants, number = self.server.participants, from_one(broadcast.round)

        def check_update(update: Update) -> None:
            check(update, broadcast)
            self.method.check_extras(self.server, update.extras)

        results, dropped = list[Result[Update]](), list[Missing]()
        done = partial(self.observer.client_done, broadcast.round)
        for result in self._run([Task("train", client) for client in participants], broadcast, check_update, done):
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

    def _run(
        self,
        tasks: Sequence[Task],
        broadcast: Broadcast,
        check_content: Callable[[Any], None],
        done: Callable[[int, int], None] = lambda *_: None,
    ) -> Iterator[Result[Any] | Missing]:
        """The results of these tasks that can be used, in the order of the tasks; of the others, why they cannot.

        Nothing that a client remembers has changed yet: see `_accept`.
        """
        self.traffic["bytes_down"] += broadcast.nbytes * len(tasks)
        tasks = [replace(task, memory=self.memory.look(task.client)) for task in tasks]
        results: dict[str, Result[Any] | Missing] = {}
        for result in self.executor.map(tasks, broadcast):
            results[result.client] = result
            done(len(results), len(tasks))
        for task in tasks:
            result = results[task.client]
            yield result if isinstance(result, Missing) else self._checked(result, check_content)

    def _checked(self, result: Result[Any], check_content: Callable[[Any], None]) -> Result[Any] | Missing:
        self.traffic["bytes_up"] += result.outcome.nbytes  # also of what cannot be used
        try:
            with reading("it cannot be checked"):
                if result.outcome.client != result.client:
                    raise BadMessage(f"it says that it is of '{result.outcome.client}'")
                check_content(result.outcome)
        except BadMessage as bad:
            return Missing(result.client, str(bad))
        return result

    def _accept(self, result: Result[Any]) -> None:
        """What a client remembers changes with what the server takes from it: SCAFFOLD's control variates, for one, are
        kept on both sides and must fit each other."""
        self.memory.keep(result.client, result.memory, self.server.round)

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
            if result.client in names:
                self._accept(result)
            else:
                self._record("not chosen", {"client": result.client})
        weights, statistics, seen = aggregator.mean(server, broadcast, counted)
        weights = method.weights(server, seen, weights)
        extras = server.extras
        if seen:
            statistics = state.keep_variances_positive(method.statistics(server, seen, statistics))
            extras = method.extras(server, seen)
        server.weights, server.statistics, server.extras = weights, statistics, extras

    # -- questions of methods --------------------------------------------------------------------------------
    def _ask(self, server: Server, clients: Sequence[str], question: str, tensors: Tensors) -> dict[str, Answer]:
        extras = (self._preparing or self.server).extras | prefixed(tensors, QUESTION)
        broadcast = Broadcast(server.round, server.rounds, server.weights, server.statistics, extras)
        self.traffic["questions"] += 1

        def check_answer(answer: Answer) -> None:
            check_samples(answer.samples)
            self.method.check_answer(server, question, answer.tensors)

        answers: dict[str, Answer] = {}
        tasks = [Task("answer", client, question=question) for client in clients]
        for result in self._run(tasks, broadcast, check_answer):
            if isinstance(result, Missing):
                number = from_one(server.round)
                self.observer.note(f"Round {number}: '{result.client}' did not answer '{question}', {result.reason}.")
                continue
            self._accept(result)
            answers[result.client] = result.outcome
        return answers

    # -- evaluation ------------------------------------------------------------------------------------------
    def _before_evaluation(self) -> Server:
        """A copy of the server whose model is the one to be tested."""
        server = self.server
        tested = replace(server, statistics=dict(server.statistics), weights=dict(server.weights))
        self.method.before_evaluation(tested)
        tested.statistics = state.keep_variances_positive(tested.statistics)
        server.memory = tested.memory
        return tested

    def _evaluate(self, server: Server) -> Scores | None:
        evaluations = self.evaluation.evaluate(server.broadcast(server.weights))
        reported = self.config.statistics[0]
        shown: Scores | None = None
        for split, statistics in sorted({(e.split, e.statistics) for e in evaluations}, reverse=True):
            group = [e for e in evaluations if (e.split, e.statistics) == (split, statistics)]
            scores = summarise(group, self.setup.held_out)
            for e in group:
                self._record("evaluation", e.metrics | {name: getattr(e, name) for name in EVALUATION_FIELDS})
            self._record("scores", {"split": split, "statistics": statistics} | scores.record())
            if split == "test" and statistics == reported:
                shown = scores
            if split == "validation" and statistics == reported:
                self._compare_with_best(server, self.how_good(vars(scores)))
        return shown

    def _compare_with_best(self, server: Server, good: float) -> None:
        first = self.best["round"] < 0 and math.isfinite(good)
        if not first and not good > self.best["accuracy"]:
            return
        self.best = {"accuracy": good, "round": server.round}
        if self.config.result == "best-validation":
            self.best_model = {**server.weights, **server.statistics}
            kept = self._local_layers() if self.method.is_personal else ()
            self.best_local = {client: state.clone(local) for client, local in kept}

    def _record(self, kind: str, record: dict[str, Any]) -> None:
        known = {"kind": kind, "round": self.server.round}  # a client's metric cannot pose as something else
        self.store.append(known | record | known)

    def _show(self, sent: Broadcast, updates: Sequence[Update], tested: Server) -> None:
        model = tested.broadcast(tested.weights)
        self.observer.aggregated(Aggregated(sent, updates, model, self.memory))

    # -- stopping and going on -------------------------------------------------------------------------------
    def _checkpoint(self, server: Server, round: int) -> None:
        groups = {name: getattr(server, name) for name in SERVER_GROUPS}
        if server is not self.server and self.method.overrides("before_evaluation"):
            groups |= {f"{TRAINED}{name}": getattr(self.server, name) for name in SERVER_GROUPS}
        local = {f"{client}/{entry}": t for client, kept in self.best_local.items() for entry, t in kept.items()}
        groups |= {"best": self.best_model, "best_local": local}
        self.store.checkpoint(Checkpoint(round, groups, self.best | self.patience.kept))

    def _restore(self) -> int:
        """Load the last good checkpoint; returns the round to begin with."""
        checkpoint = self.store.latest(self.observer.note)
        if checkpoint is None:
            self.store.truncate()
            return 0
        groups, device = checkpoint.groups, self.setup.worker.device
        for name in ("weights", "statistics"):
            stored, expected = (
                {entry: tensor.shape for entry, tensor in tensors.items()}
                for tensors in (groups.get(name, {}), getattr(self.server, name))
            )
            if stored != expected:
                raise StoreError(
                    f"The checkpoints of '{self.store.directory}' are of another model than the one given: "
                    "resume with the model and the method that the run began with."
                )
        self.best_model, self.best = groups.get("best", {}), checkpoint.best
        self.patience.restore(checkpoint.best)
        is_over = self._is_last(checkpoint.round)
        prefix = TRAINED if checkpoint.keeps_trained and not is_over else ""
        for name in SERVER_GROUPS:
            setattr(self.server, name, state.to_device(groups.get(prefix + name, {}), device))
        for name, tensor in groups.get("best_local", {}).items():
            client, _, entry = name.rpartition("/")
            self.best_local.setdefault(client, {})[entry] = tensor
        return self.config.rounds if is_over else checkpoint.round + 1

    def local_tensors(self) -> Iterable[tuple[str, Tensors]]:
        """What each client keeps of the model that is the result, one client at a time, for saving personal models."""
        return self.best_local.items() or self._local_layers()

    def _local_layers(self) -> Iterator[tuple[str, Tensors]]:
        for name, memory in self.memory.items():
            if local := select(memory, LOCAL):
                yield name, local
