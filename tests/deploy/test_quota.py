"""A site has one reply in the server's store, of a size that a reply may have; of what was killed, nothing is left."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fastapi import HTTPException
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from fedkeel.deploy.flower_processes import free_removed_keys, limit_store
from fedkeel.deploy.processes import delete_messages
from fedkeel.deploy.quota import LARGEST, Quota, most_pieces
from fedkeel.engine.executors.flower.channel import largest_reply

pytestmark = pytest.mark.slow

MEGABYTE = 2**20


class Store:
    """Flower's own state in a file, a run that is under way, and a node."""

    def __init__(self, database: Path) -> None:
        self.database = database
        _, factory = get_objectstore_linkstate_factories(str(database), get_federation_manager())
        self.state: Any = factory.state()
        self.node = self.new_node(b"a key")
        self.run = self.state.create_run("a/b", "1", "0", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, "serverapp")
        (run,) = self.state.get_run_info(run_ids=[self.run])
        assert self.state.claim_task(run.primary_task_id)
        assert self.state.activate_task(run.primary_task_id)

    def new_node(self, key: bytes) -> int:
        node = int(self.state.create_node(NOOP_FLWR_AID, "me", key, 30))
        assert self.state.activate_node(node, 30)
        return node

    def send(self, size: int, to: int | None = None) -> Message:
        """What the server does: announce a message with so many bytes, then push its pieces."""
        message = self._message(Message(records(size), to or self.node, MessageType.TRAIN, ttl=600), SUPERLINK_NODE_ID)
        session = self.state.start_session(self.run)
        stored, pieces = self.state.store_message_and_object_tree(
            remove_content_from_message(message), get_object_tree(message), session
        )
        assert stored
        for number in pieces:
            content = get_all_nested_objects(message)[number].deflate()
            request = PushObjectRequest(
                node=Node(node_id=SUPERLINK_NODE_ID), object_id=number, object_content=content, session_id=session
            )
            task = type("Task", (), {"run_id": self.run})
            assert runtime_handlers.push_object(request, self.state, task).stored
        return message

    def reply(self, to: Message, size: int) -> Message:
        return self._message(Message(records(size), reply_to=to), self.node)

    def _message(self, message: Message, sender: int) -> Message:
        message.metadata.__dict__["_run_id"] = self.run
        message.metadata.__dict__["_src_node_id"] = sender
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def announce(self, reply: Message, node: int | None = None, tree: Any = None) -> Any:
        proto = message_to_proto(remove_content_from_message(reply))
        request = PushMessagesRequest(
            node=Node(node_id=node or self.node),
            messages_list=[proto],
            message_object_trees=[tree or get_object_tree(reply)],
        )
        return fleet_handlers.push_messages(request=request, state=self.state)

    def push(self, reply: Message, answer: Any, node: int | None = None) -> None:
        for number in answer.objects_to_push:
            request = PushObjectRequest(
                node=Node(node_id=node or self.node),
                run_id=self.run,
                object_id=number,
                object_content=get_all_nested_objects(reply)[number].deflate(),
                session_id=answer.session_id,
            )
            fleet_handlers.push_object(request=request, state=self.state)

    @property
    def bytes(self) -> int:
        with sqlite3.connect(self.database) as connection:
            return int(connection.execute("SELECT COALESCE(SUM(LENGTH(content)), 0) FROM objects").fetchone()[0])


def records(size: int) -> RecordDict:
    array = Array(dtype="uint8", shape=(size,), stype="x", data=os.urandom(size))
    return RecordDict({"a": ArrayRecord({"b": array})})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for module, name in (
        (runtime_handlers, "push_object"),
        (fleet_handlers, "push_messages"),
        (fleet_handlers, "push_object"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    limit_store(Quota())
    store = Store(tmp_path / "link.db")
    for name, value in (("_task_id", 1), ("_run_id", store.run), ("_node_id", SUPERLINK_NODE_ID)):
        monkeypatch.setattr(TaskIdentity, name, value)  # as in the server's own process
    return store


def test_a_reply_of_an_ordinary_size_is_stored_whole(store: Store) -> None:
    question = store.send(MEGABYTE)
    before = store.bytes
    reply = store.reply(question, 3 * MEGABYTE)
    store.push(reply, store.announce(reply))
    assert 3 * MEGABYTE < store.bytes - before < 3.1 * MEGABYTE


def test_a_reply_that_goes_on_and_on_is_cut_off_and_deleted(store: Store) -> None:
    question = store.send(MEGABYTE)
    before = store.bytes
    reply = store.reply(question, 60 * MEGABYTE)
    answer = store.announce(reply)
    with pytest.raises(HTTPException, match="more than"):
        store.push(reply, answer)
    assert store.bytes == before
    with pytest.raises(HTTPException, match="more than"):
        store.push(reply, answer)
    assert store.bytes == before


def test_the_next_reply_takes_the_place_of_one_that_nobody_fetched(store: Store) -> None:
    sizes = []
    for _ in range(4):
        question = store.send(1000)
        reply = store.reply(question, 2 * MEGABYTE)
        store.push(reply, store.announce(reply))
        store.push(reply, store.announce(reply))  # sent again, as after a cut of the network
        sizes.append(store.bytes)
    assert max(sizes) < 2.1 * MEGABYTE


def test_pieces_of_an_earlier_reply_are_not_kept_by_naming_them_in_the_next(store: Store) -> None:
    first = store.reply(store.send(1000), 2 * MEGABYTE)
    store.push(first, store.announce(first))
    second = store.reply(store.send(1000), 1000)
    tree = get_object_tree(second)
    tree.children.extend(get_object_tree(first).children)
    answer = store.announce(second, tree=tree)
    assert store.bytes < 0.1 * MEGABYTE
    assert set(get_all_nested_objects(first)) - {first.object_id} <= set(answer.objects_to_push)


def test_a_late_reply_that_is_not_stored_leaves_the_present_one_alone(store: Store) -> None:
    old, new = store.send(1000), store.send(1000)
    reply = store.reply(new, MEGABYTE)
    answer = store.announce(reply)
    store.state.delete_messages({old.metadata.message_id})  # its time is over
    store.announce(store.reply(old, MEGABYTE))
    store.push(reply, answer)
    assert store.bytes > MEGABYTE


def test_a_reply_is_one_s_own_and_of_few_pieces(store: Store) -> None:
    question, other = store.send(MEGABYTE), store.new_node(b"another key")
    reply = store.reply(question, 1000)
    with pytest.raises(HTTPException, match="in the name of"):
        store.announce(reply, node=other)
    with pytest.raises(HTTPException, match="something else"):
        store.announce(reply, tree=get_object_tree(question))
    tree = get_object_tree(reply)
    for number in range(most_pieces(2 * MEGABYTE)):
        tree.children.add(object_id=f"{number:064x}")
    with pytest.raises(HTTPException, match="pieces"):
        store.announce(reply, tree=tree)
    answer = store.announce(reply)
    with pytest.raises(HTTPException, match="no reply of it"):
        store.push(reply, answer, node=other)
    store.push(reply, answer)


def test_what_a_site_may_send_follows_what_it_was_sent() -> None:
    quota = Quota()
    quota.sent("one", 10 * MEGABYTE)
    quota.sent("one", 5 * MEGABYTE)
    quota.sent("two", 1000)  # a question without the model does not make the answers to the model shorter
    quota.announced(7, "reply", "session")
    deleted: list[str] = []
    quota.take(7, "session", largest_reply(15 * MEGABYTE), deleted.append)
    quota.take(7, "session", LARGEST, deleted.append)
    assert not deleted
    with pytest.raises(HTTPException, match="has more than"):
        quota.take(7, "session", 1, deleted.append)
    assert deleted == ["reply"]


def test_a_key_that_was_removed_may_be_added_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower by itself keeps it for ever, and refuses it as one already in use."""
    monkeypatch.setattr(SqlLinkState, "delete_node", SqlLinkState.delete_node)  # put back at the end
    free_removed_keys()
    store.state.delete_node(NOOP_FLWR_AID, store.node)
    assert store.state.get_node_id_by_public_key(b"a key") is None
    again = store.new_node(b"a key")
    assert again != store.node
    assert store.state.get_node_id_by_public_key(b"a key") == again


def test_of_a_server_that_was_killed_the_nodes_are_kept_and_the_messages_are_not(tmp_path: Path, store: Store) -> None:
    question = store.send(4 * MEGABYTE)
    reply = store.reply(question, MEGABYTE)
    store.push(reply, store.announce(reply))
    delete_messages(store.database)
    assert store.bytes == 0
    assert store.database.stat().st_size < MEGABYTE
    assert store.state.get_node_id_by_public_key(b"a key") == store.node
    assert store.send(1000), "and it goes on"
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"not a database at all" * 100)
    delete_messages(damaged)
    assert not damaged.exists()
