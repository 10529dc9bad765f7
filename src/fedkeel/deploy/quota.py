"""What a site may leave in the store of Flower's process: one reply at a time, and no larger than a reply may be.

Flower stores whatever a node with a key sends, before anyone looks at it, and deletes a reply when it was fetched. One
that is too large, comes too late or is never complete would lie there until the end of the run.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from fedkeel.engine.executors.flower.limits import LARGEST, largest_reply, most_pieces


class Refused(Exception):
    """A reply, or a piece of one, that the store does not take. `reply` is what is to be deleted of it."""

    def __init__(self, reason: str, reply: str = "") -> None:
        super().__init__(reason)
        self.reply = reply


@dataclass
class Open:
    """The reply of a site that is in the store."""

    reply: str
    session: str
    bytes: int = 0


class Quota:
    """Keeps account of what each site has in the store, by what the server itself sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Open] = {}
        self._session, self._in_session, self._sent = "", 0, 0

    def sent(self, session: str, size: int) -> None:
        """The server sends so many bytes more; what it sends at once to all sites is one session."""
        with self._lock:
            self._in_session = size + (self._in_session if session == self._session else 0)
            self._session, self._sent = session, max(self._sent, self._in_session)

    def check(self, node: int, sender: int, reply: str, root: str, pieces: int) -> None:
        """Before a reply is announced to the store."""
        if sender != node:
            raise Refused(f"Node {node} replies in the name of node {sender}.")
        if root != reply:
            raise Refused(f"The reply of node {node} announces the pieces of something else.")
        if pieces > most_pieces(self._sent):
            raise Refused(f"The reply of node {node} has {pieces:,} pieces, more than {most_pieces(self._sent):,}.")

    def earlier(self, node: int, reply: str) -> str:
        """The reply of this site that is in the store, if there is one, and another."""
        with self._lock:
            known = self._open.get(node)
            return known.reply if known is not None and known.reply != reply else ""

    def begun(self, node: int, reply: str, session: str) -> None:
        """The reply is announced, or announced again."""
        with self._lock:
            known = self._open.get(node)
            so_far = known.bytes if known is not None and known.reply == reply else 0
            self._open[node] = Open(reply, session, so_far)

    def take(self, node: int, session: str, size: int) -> None:
        """Before a piece of a reply is stored."""
        with self._lock:
            known = self._open.get(node)
            if known is None or known.session != session:
                raise Refused(f"A piece of node {node} belongs to no reply of it.")
            known.bytes += size
            most = largest_reply(self._sent) + LARGEST
            if known.bytes > most:
                raise Refused(f"The reply of node {node} has more than {most:,} bytes.", known.reply)


def install(quota: Quota) -> None:
    """Have Flower's process ask the quota before it stores anything."""
    from fastapi import HTTPException
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers

    usual_sent = runtime_handlers.push_object
    usual_begun, usual_take = fleet_handlers.push_messages, fleet_handlers.push_object

    def sent(request: Any, state: Any, task: Any) -> Any:
        quota.sent(request.session_id, len(request.object_content))
        return usual_sent(request, state, task)

    def begun(request: Any, state: Any) -> Any:
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "One reply at a time.")
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        try:
            pieces = sum(1 for _ in iterate_object_tree(tree))
            quota.check(node, metadata.src_node_id, metadata.message_id, tree.object_id, pieces)
        except Refused as refused:
            raise HTTPException(413, str(refused)) from refused
        earlier = quota.earlier(node, tree.object_id)
        if earlier and state.get_valid_message_ins(metadata.reply_to_message_id) is not None:
            state.object_store.delete(earlier)  # before: else its pieces would be in the store, and not on the account
        answer = usual_begun(request=request, state=state)
        if tree.object_id in state.object_store:
            quota.begun(node, tree.object_id, answer.session_id)
        return answer

    def take(request: Any, state: Any) -> Any:
        try:
            quota.take(request.node.node_id, request.session_id, len(request.object_content))
        except Refused as refused:
            if refused.reply:
                state.object_store.delete(refused.reply)
            raise HTTPException(413, str(refused)) from refused
        return usual_take(request=request, state=state)

    runtime_handlers.push_object = sent
    fleet_handlers.push_messages, fleet_handlers.push_object = begun, take
