"""A small message travels in one request, its pieces with it.

Flower announces a message first, and then sends each of its pieces, of which there are at least three, in a request of
its own; who gets it asks for them in the same way. Most of what a round of a small model takes are such requests. Here
small pieces lie behind the announcement, in a field of Protocol Buffers that Flower's own kinds of messages do not have
and pass over: whoever does not know of it sends and asks as ever.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

MOST = 4 * 2**20  # bytes behind one announcement
FIELD = 7531  # far from Flower's own numbers


def _kind() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="fedkeel/pieces.proto", package="fedkeel", syntax="proto3")
    kind, many = file.message_type.add(name="Pieces"), descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    kind.field.add(name="ids", number=FIELD, label=many, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING)
    kind.field.add(name="contents", number=FIELD + 1, label=many, type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("fedkeel.Pieces"))


Pieces = _kind()


def gather(trees: Iterable[Any], content_of: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """All pieces of these messages; none where one is not there yet, or all are too much for one request."""
    found: dict[str, bytes] = {}
    room = MOST
    for identity in dict.fromkeys(piece.object_id for tree in trees for piece in iterate_object_tree(tree)):
        content = content_of(identity) or b""
        room -= len(content)
        if not content or room < 0:
            return {}
        found[identity] = content
    return found


def attach(message: Any, pieces: Mapping[str, bytes]) -> None:
    """Behind a message of Protocol Buffers, whatever its kind."""
    message.MergeFromString(Pieces(ids=pieces.keys(), contents=pieces.values()).SerializeToString())


def attached(message: Any) -> dict[str, bytes]:
    pieces = Pieces.FromString(message.SerializeToString())
    return dict(zip(pieces.ids, pieces.contents, strict=False))


class Carrying:
    """A client of Flower's whose messages have their small pieces with them.

    Args:
        content_of: a piece of a message that is announced through this client, if it is at hand.
    """

    def __init__(self, client: Any, content_of: Callable[[str], bytes | None] = lambda _: None) -> None:
        self._client, self._content_of = client, content_of
        self._came: dict[str, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PushMessages(self, request: Any) -> Any:  # noqa: N802 - Flower's names
        attach(request, gather(request.message_object_trees, self._content_of))
        return self._client.PushMessages(request)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        answer = self._client.PullMessages(request)
        self._came = attached(answer)  # those of an earlier message that nobody asked for are gone with it
        return answer

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        content = self._came.pop(request.object_id, None)
        if content is None:
            return self._client.PullObject(request)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)
