"""A finished run that goes on for more rounds, as if it had been planned so from the start."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.engine.schedules import learning_rate_at
from fedkeel.errors import FedkeelError, StoreError
from fedkeel.files import explained, read_sealed, seal, write_atomically

if TYPE_CHECKING:
    from fedkeel.runs.run import Run
    from fedkeel.runs.store import Store

FILE = "extended.json"


def extensions(directory: Path) -> dict[int, int]:
    """After how many rounds it was finished before, and how many it was to have then."""
    stored = read_sealed(directory / FILE)
    try:
        return {int(done): int(planned) for done, planned in stored["extended"].items()} if stored else {}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"'{directory / FILE}' has no numbers of rounds: put it back from a copy.") from error


def _refuse_whole(before: Config, after: Config, done: int, method: Composition) -> None:
    """Refuse what would have done otherwise in the rounds that are over, had it known how many there would be."""
    at_fault = [f"the method '{part.name}'" for part in method.parts if _goes_by_rounds(part)]
    if any(learning_rate_at(before, round) != learning_rate_at(after, round) for round in range(done)):
        at_fault = [f"the schedule '{before.schedule}'"]
    if at_fault and before.rounds != after.rounds:
        raise FedkeelError(
            f"What {at_fault[0]} does depends on the number of rounds, which was {before.rounds}: train anew with "
            f"'fedkeel run --config DIR/config.toml --rounds {after.rounds}'."
        )


def _goes_by_rounds(method: Method) -> bool:
    """Whether its code has the word in it."""
    classes = type(method).__mro__[: type(method).__mro__.index(Method)]
    functions = [value for cls in classes for value in vars(cls).values() if isinstance(value, FunctionType)]
    return any("rounds" in _names_in(function.__code__) for function in functions)


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def reopen(run: Run, store: Store, method: Composition, rounds: int) -> None:
    """Be a run of `rounds` that was stopped before them. What is killed in between can be asked for again."""
    done = run.rounds_done
    _refuse_whole(run.config, run.config.replace(rounds=rounds), done, method)
    checkpoint = store.latest(lambda _: None)
    if checkpoint is None:
        raise FedkeelError(f"'{store.directory}' has no checkpoint that is whole: there is nothing to go on from.")
    planned = {done: store.config.rounds} | store.extended
    with explained(store.directory):
        (store.directory / "summary.json").unlink(missing_ok=True)  # with it the run would be finished, and these files
        write_atomically(store.directory / FILE, seal({"extended": {str(n): planned[n] for n in sorted(planned)}}))
        store.config = store.config.replace(rounds=rounds)
        write_atomically(store.directory / "config.toml", store.config.to_toml().encode())
