"""What 'fedkeel certificates' makes is what TLS and Flower's node keys want."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography, which comes with flwr, is not installed")

from fedkeel.engine.flower import deployment
from fedkeel.engine.flower.addresses import refuse_untrusted
from fedkeel.engine.flower.certificates import ServerFiles, SiteFiles, make
from fedkeel.engine.flower.keys import read_keys
from fedkeel.errors import FedkeelError


def listen(files: ServerFiles, times: int) -> int:
    """A TLS server with this certificate, for a few connections; returns its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(times):
            plain, _address = door.accept()
            try:
                with context.wrap_socket(plain, server_side=True):
                    pass
            except OSError:
                pass
        door.close()

    threading.Thread(target=serve, daemon=True).start()
    return int(door.getsockname()[1])


def test_a_site_trusts_its_server_and_no_other(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make(tmp_path / name, ["north"], ["localhost", "127.0.0.1"])
    server, site = ServerFiles.of(tmp_path / "ours/server"), SiteFiles.of(tmp_path / "ours/sites/north")
    server.check()
    site.check()
    port = listen(server, 3)
    refuse_untrusted("localhost", port, site.ca)
    refuse_untrusted("127.0.0.1", port, site.ca)
    with pytest.raises(FedkeelError, match="is not trusted"):
        refuse_untrusted("localhost", port, tmp_path / "theirs/sites/north/ca.pem")


def test_a_certificate_for_another_name_and_an_expired_one_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "other", ["north"], ["fl.example.org"])
    other = ServerFiles.of(tmp_path / "other/server")
    with pytest.raises(FedkeelError, match=r"not trusted.*localhost"):
        refuse_untrusted("localhost", listen(other, 1), other.ca)
    make(tmp_path / "old", ["north"], ["localhost"], days=0)
    old = ServerFiles.of(tmp_path / "old/server")
    with pytest.raises(FedkeelError, match="expired on"):
        old.check()
    with pytest.raises(FedkeelError, match=r"not trusted.*expired"):
        refuse_untrusted("localhost", listen(old, 1), old.ca)


def test_private_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make(tmp_path, ["north"], ["localhost"])
    for key in ("authority.key", "server/server.key", "sites/north/site.key"):
        assert (tmp_path / key).stat().st_mode & 0o077 == 0
    given_to_site = {path.name for path in (tmp_path / "sites/north").iterdir()}
    assert given_to_site == {"ca.pem", "site.key"}


def test_more_sites_are_added_and_nothing_else_changes(tmp_path: Path) -> None:
    make(tmp_path, ["north"], ["localhost"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    make(tmp_path, ["north", "south"], ["localhost"])
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(read_keys(tmp_path / "server/sites")) == ["north", "south"]


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a\nb"])
def test_a_site_needs_a_name_that_a_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedkeelError, match="cannot be called"):
        make(tmp_path, [name], ["localhost"])


def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match=r"certificate of the authority is not at .*fedkeel certificates"):
        ServerFiles.of(tmp_path).check()
    make(tmp_path, ["north"], ["localhost"])
    (tmp_path / "server/sites/north.pub").write_text("garbage")
    with pytest.raises(FedkeelError, match="is not a public key"):
        read_keys(tmp_path / "server/sites")
    (tmp_path / "server/sites/north.pub").unlink()
    with pytest.raises(FedkeelError, match="no public keys of sites"):
        ServerFiles.of(tmp_path / "server").check()


def test_a_site_tries_again_soon_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(deployment.time, "monotonic", lambda: clock)
    pauses, waited = deployment.Pauses(), []
    for lasted in (1, 1, 1, 1, 1, 500, 1):
        pauses.begin()
        clock += lasted
        waited.append(pauses.next())
    assert waited == [5, 10, 20, 30, 30, 5, 10]
