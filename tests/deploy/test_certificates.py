"""What 'fedkeel certificates' makes is what TLS and Flower's node keys want."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedkeel.cli import main
from fedkeel.deploy import deployment
from fedkeel.deploy.addresses import refuse_untrusted
from fedkeel.deploy.certificates import ServerFiles, SiteFiles, make
from fedkeel.deploy.keys import read_keys
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


@pytest.mark.parametrize("host", ["bad host", "", "-x", "a/b", "1.2.3.4:9092", "münchen"])
def test_a_server_needs_a_name_that_a_machine_can_have(tmp_path: Path, host: str) -> None:
    with pytest.raises(FedkeelError, match=f"'host' is '{host}', which is no name or address"):
        make(tmp_path / "keys", ["north"], ["localhost", "10.0.0.1", "::1", "fl_1.example.org", "*.example.org", host])
    assert not (tmp_path / "keys").exists()


def test_a_name_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["certificates", "--out", str(tmp_path / "keys")]
    assert main([*out, "--sites", "a,b, a"]) == 2
    assert "'sites' has 'a' twice: give each once." in capsys.readouterr().err
    assert main([*out, "--sites", "a", "--host", "x,x"]) == 2
    assert "'host' has 'x' twice: give each once." in capsys.readouterr().err


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


def test_a_site_tries_again_soon_and_then_less_often() -> None:
    waits = [deployment.RETRY / 2]
    for lasted in (1, 1, 1, 1, 1, 500, 1):
        waits.append(deployment.next_pause(waits[-1], lasted))
    assert waits[1:] == [5, 10, 20, 30, 30, 5, 10]


# -- what is wrong with a file is said where the file is ---------------------------------------------------------
@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    for name in ("ours", "theirs"):
        make(place / name, ["north"], ["localhost", "127.0.0.1"])
    return place


def private_key(kind: str, password: bytes = b"") -> bytes:
    """A key as somebody else's tool might write it."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    key = ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP384R1())
    locked = s.BestAvailableEncryption(password) if password else s.NoEncryption()
    return key.private_bytes(
        s.Encoding.PEM, s.PrivateFormat.PKCS8 if kind == "pem" else s.PrivateFormat.OpenSSH, locked
    )


def locked_key(made: Path) -> bytes:
    """As 'ssh-keygen' writes one with a password; what is locked is never looked at."""

    def field(content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + content

    public = b64decode((made / "ours/server/sites/north.pub").read_bytes().split()[1])
    options = field(bytes(16)) + struct.pack(">I", 16)
    parts = [field(b"aes256-ctr"), field(b"bcrypt"), field(options), struct.pack(">I", 1), field(public)]
    text = b64encode(b"openssh-key-v1\0" + b"".join(parts) + field(bytes(160)))
    return b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + text + b"\n-----END OPENSSH PRIVATE KEY-----\n"


SITE_KEYS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda _: b"\n", "is empty"),
    "garbage": (lambda _: bytes(range(256)), "is something else and not a private key in OpenSSH's format"),
    "a word": (lambda _: b"hello", "is something else"),
    "its public half": (lambda made: (made / "ours/server/sites/north.pub").read_bytes(), "is a public key and not"),
    "a certificate": (lambda made: (made / "ours/server/ca.pem").read_bytes(), "is a certificate and not"),
    "of another format": (lambda _: private_key("pem"), "is a private key of another format"),
    "half of it": (lambda made: (made / "ours/sites/north/site.key").read_bytes()[:200], "is a private key and not"),
    "another curve": (lambda _: private_key("ed25519"), "is not of a NIST curve"),
    "locked": (locked_key, "is locked with a password"),
}


@pytest.mark.parametrize(("content", "said"), SITE_KEYS.values(), ids=list(SITE_KEYS))
def test_a_key_that_a_site_cannot_use_is_told_there(
    made: Path, tmp_path: Path, content: Callable[[Path], bytes], said: str
) -> None:
    key = tmp_path / "site.key"
    key.write_bytes(content(made))
    with pytest.raises(FedkeelError, match=f"The key of this site, '{key}', {said}") as told:
        SiteFiles(made / "ours/sites/north/ca.pem", key).check()
    assert one_sentence(told)


def one_sentence(told: pytest.ExceptionInfo[FedkeelError]) -> bool:
    text = str(told.value)
    return text.endswith(".") and "\n" not in text and ". " not in text


CERTIFICATES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda _: b"", "is empty"),
    "garbage": (lambda _: bytes(range(256)), "is something else"),
    "half of it": (lambda made: (made / "ours/server/ca.pem").read_bytes()[:200], "is half a certificate"),
    "a key": (lambda made: (made / "ours/server/server.key").read_bytes(), "is a private key"),
    "damaged": (
        lambda made: (made / "ours/server/ca.pem").read_bytes().replace(b"M", b"!", 3),
        "is a certificate and not a certificate in PEM that can be used",
    ),
}


@pytest.mark.parametrize(("content", "said"), CERTIFICATES.values(), ids=list(CERTIFICATES))
def test_a_certificate_that_cannot_be_used_is_told_at_its_end(
    made: Path, tmp_path: Path, content: Callable[[Path], bytes], said: str
) -> None:
    bad, server = tmp_path / "bad.pem", ServerFiles.of(made / "ours/server")
    bad.write_bytes(content(made))
    for files in (SiteFiles(bad, made / "ours/sites/north/site.key"), replace(server, ca=bad)):
        with pytest.raises(FedkeelError, match=f"The certificate of the authority, '{bad}', {said}") as told:
            files.check()
        assert one_sentence(told)
    with pytest.raises(FedkeelError, match=f"The certificate of the server, '{bad}', {said}"):
        replace(server, certificate=bad).check()


def test_a_folder_and_a_file_that_may_not_be_read_are_told(made: Path, tmp_path: Path) -> None:
    ca, key = made / "ours/sites/north/ca.pem", tmp_path / "site.key"
    with pytest.raises(FedkeelError, match=r"The key of this site is not at .*site.key"):
        SiteFiles(ca, key).check()
    with pytest.raises(FedkeelError, match=r"cannot be read \(is a directory\)"):
        SiteFiles(ca, tmp_path).check()
    with pytest.raises(FedkeelError, match=r"cannot be read \(is a directory\)"):
        SiteFiles(tmp_path, key).check()
    key.write_bytes((made / "ours/sites/north/site.key").read_bytes())
    key.chmod(0)
    if not os.access(key, os.R_OK):  # for root, everything can be read
        with pytest.raises(FedkeelError, match=r"cannot be read \(permission denied\)"):
            SiteFiles(ca, key).check()


def test_what_does_not_belong_together_is_told_at_the_server(made: Path, tmp_path: Path) -> None:
    ours, theirs = (ServerFiles.of(made / name / "server") for name in ("ours", "theirs"))
    ours.check()
    with pytest.raises(FedkeelError, match=r"is not that of the certificate .*server.pem") as told:
        replace(ours, key=theirs.key).check()
    assert one_sentence(told)
    with pytest.raises(FedkeelError, match=r"No site that has .*ca.pem' would trust the certificate") as told:
        replace(ours, ca=theirs.ca).check()
    assert one_sentence(told)
    for name, content, said in (
        ("locked", private_key("pem", b"password"), "is locked with a password"),
        ("garbage", b"hello", "is something else"),
        ("public", (made / "ours/server/sites/north.pub").read_bytes(), "is a public key"),
        ("empty", b"", "is empty"),
    ):
        key = tmp_path / name
        key.write_bytes(content)
        with pytest.raises(FedkeelError, match=f"The key of the server, '{key}', {said}") as told:
            replace(ours, key=key).check()
        assert one_sentence(told)


def test_tls_at_one_end_alone_is_told_at_the_other(made: Path) -> None:
    pytest.importorskip("uvicorn")
    from tests.deploy.served import Served

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError

    ours = ServerFiles.of(made / "ours/server")
    with Served(app) as plain, Served(app, files=ours) as guarded:
        refuse_untrusted("127.0.0.1", plain.port, None)
        refuse_untrusted("127.0.0.1", guarded.port, ours.ca)
        with pytest.raises(FedkeelError, match="does not use TLS, as one with '--insecure'") as told:
            refuse_untrusted("127.0.0.1", plain.port, ours.ca)
        assert one_sentence(told)
        with pytest.raises(FedkeelError, match="uses TLS, and this site was started with '--insecure'") as told:
            refuse_untrusted("127.0.0.1", guarded.port, None)
        assert one_sentence(told)
