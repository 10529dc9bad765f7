"""A finished run that goes on for more rounds, as if it had been planned so from the start.

`extended.json` says after how many rounds it was finished before, and how many it was to have then.
"""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.engine.schedules import learning_rate_at
from fedkeel.errors import FedkeelError
from fedkeel.files import explained, read_sealed, seal, write_atomically

if TYPE_CHECKING:
    from fedkeel.runs.store import Store

FILE = "extended.json"


def extensions(directory: Path) -> dict[int, int]:
    """The rounds it was to have, by those after which it was finished."""
    stored = read_sealed(directory / FILE)
    return {int(done): int(planned) for done, planned in stored["extended"].items()} if stored else {}


def refuse_whole(before: Config, after: Config, done: int, method: Composition) -> None:
    """Refuse what would have done otherwise in the rounds that are over, had it known how many there would be."""
    if before.rounds == after.rounds:
        return
    anew = f"train anew with 'fedkeel run --config DIR/config.toml --rounds {after.rounds}'."
    if any(learning_rate_at(before, round) != learning_rate_at(after, round) for round in range(done)):
        raise FedkeelError(f"The schedule '{before.schedule}' goes by the number of rounds, {before.rounds}: {anew}")
    for part in method.parts:
        if "rounds" in _names(type(part)):
            raise FedkeelError(f"'{part.name}' goes by the number of rounds, which was {before.rounds}: {anew}")


def _names(kind: type) -> set[str]:
    """All that the functions of a method's class refer to."""
    classes = kind.__mro__[: kind.__mro__.index(Method)]
    values: list[Any] = [value for cls in classes for value in vars(cls).values()]
    codes = [function.__code__ for value in values if isinstance(function := _plain(value), FunctionType)]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found |= {*code.co_names}
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found


def _plain(value: Any) -> Any:
    return getattr(value, "__func__", getattr(value, "fget", value))


def reopen(store: Store, method: Composition, done: int, rounds: int) -> None:
    """Be a run of `rounds` that was stopped after `done`. What is killed in between can be asked for again."""
    checkpoint = store.latest(lambda _: None)
    if checkpoint is None:
        raise FedkeelError(f"'{store.directory}' has no checkpoint that is whole: there is nothing to go on from.")
    if method.overrides("before_evaluation") and checkpoint.round + 1 == done and not checkpoint.keeps_trained:
        raise FedkeelError(
            f"The model of '{store.directory}' as it was before its last test was not kept by the version of Fedkeel "
            "that trained it: train anew."
        )
    planned = {done: store.config.rounds} | store.extended
    with explained(store.directory):
        write_atomically(store.directory / FILE, seal({"extended": {str(n): planned[n] for n in sorted(planned)}}))
        store.config = store.config.replace(rounds=rounds)
        write_atomically(store.directory / "config.toml", store.config.to_toml().encode())
        (store.directory / "summary.json").unlink(missing_ok=True)  # with it the run would be finished
