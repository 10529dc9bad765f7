"""A private certificate authority, a server certificate and a key for each site: enough for a trial.

    DIR/authority.key      signs the server's certificate; keep it offline
    DIR/server/            ca.pem  server.pem  server.key  sites/NAME.pub
    DIR/sites/NAME/        ca.pem  site.key

The server gets `server/`, each site its own folder. The authority vouches for the server; the site's key vouches for
the site, and the server knows it by the public half.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeel.core.naming import file_name
from fedkeel.errors import FedkeelError


@dataclass(frozen=True)
class ServerFiles:
    """What a server needs: its certificate and key, the authority's certificate, the public keys of its sites."""

    ca: Path
    certificate: Path
    key: Path
    sites: Path

    @staticmethod
    def of(folder: Path) -> ServerFiles:
        return ServerFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key", folder / "sites")

    def check(self) -> None:
        check_authority(self.ca)
        content("key of the server", self.key)
        refuse_expired(self.certificate)
        refuse_what_does_not_fit(self)
        if not any(self.sites.glob("*.pub")):
            raise FedkeelError(f"There are no public keys of sites in '{self.sites}': put NAME.pub of each site there.")


@dataclass(frozen=True)
class SiteFiles:
    """What a site needs: the authority's certificate and its own key."""

    ca: Path
    key: Path

    @staticmethod
    def of(folder: Path) -> SiteFiles:
        return SiteFiles(folder / "ca.pem", folder / "site.key")

    def check(self) -> None:
        check_authority(self.ca)
        check_site_key(self.key)


def content(what: str, path: Path) -> bytes:
    """Of one of these files, or a sentence that says why there is none."""
    try:
        found = path.read_bytes()
    except OSError as error:
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        problem = f" is not at '{path}'" if gone else f", '{path}', cannot be read ({str(error.strerror).lower()})"
        raise FedkeelError(
            f"The {what}{problem}: give its path, or make a set for a trial with 'fedkeel certificates'."
        ) from error
    if not found.strip():
        raise FedkeelError(f"The {what}, '{path}', is empty: copy it here again.")
    return found


def kind_of(found: bytes) -> str:
    """What a file seems to be that is not what it should be."""
    if b"PRIVATE KEY-----" in found:
        return "a private key" + (" of another format" if b"OPENSSH" not in found else "")
    if b"BEGIN CERTIFICATE-----" in found:
        return "a certificate" if b"END CERTIFICATE-----" in found else "half a certificate"
    if found.startswith((b"ecdsa-", b"ssh-", b"sk-")) or b"PUBLIC KEY-----" in found:
        return "a public key"
    return "something else"


def check_authority(path: Path) -> None:
    from cryptography import x509

    found = content("certificate of the authority", path)
    try:
        x509.load_pem_x509_certificates(found)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=str(path))
    except (ValueError, ssl.SSLError) as error:
        raise FedkeelError(
            f"The certificate of the authority, '{path}', is {kind_of(found)} and not a certificate in PEM that can be "
            "used: ask the server's operator for ca.pem."
        ) from error


def check_site_key(path: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    found = content("key of this site", path)
    make_one = "make one with \"ssh-keygen -t ecdsa -b 384 -N '' -f site.key\""
    try:
        key = serialization.load_ssh_private_key(found, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if "assword" in str(error):
            raise FedkeelError(
                f"The key of this site, '{path}', is locked with a password, which nobody can type for it: "
                "remove it with \"ssh-keygen -p -N '' -f site.key\"."
            ) from error
        raise FedkeelError(
            f"The key of this site, '{path}', is {kind_of(found)} and not a private key in OpenSSH's format "
            f"that can be used: {make_one}."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedkeelError(f"The key of this site, '{path}', is not of a NIST curve: {make_one}.")


def refuse_what_does_not_fit(files: ServerFiles) -> None:
    """A key of another certificate, or a certificate of another authority: found before any site comes, by shaking
    hands with oneself."""
    server, site = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    locked = False

    def asked() -> str:
        nonlocal locked
        locked = True
        return ""

    try:
        server.load_cert_chain(files.certificate, files.key, password=asked)
    except ssl.SSLError as error:
        if locked:
            problem = "is locked with a password, which nobody can type for it: give one without"
        elif error.reason == "KEY_VALUES_MISMATCH":
            problem = f"is not that of the certificate '{files.certificate}': give the one it was made with"
        else:
            found = kind_of(files.key.read_bytes())
            problem = f"is {found} and not a private key in PEM that can be used: give the one of the certificate"
        raise FedkeelError(f"The key of the server, '{files.key}', {problem}.") from error
    site.check_hostname = False
    site.load_verify_locations(cafile=str(files.ca))
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = site.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for _ in range(4):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason
        raise FedkeelError(
            f"No site that has '{files.ca}' would trust the certificate '{files.certificate}' ({reason}): "
            "give the certificate of the authority that signed it."
        ) from error


def refuse_expired(path: Path) -> None:
    from cryptography import x509

    found = content("certificate of the server", path)
    try:
        certificate = x509.load_pem_x509_certificate(found)
    except ValueError as error:
        raise FedkeelError(
            f"The certificate of the server, '{path}', is {kind_of(found)} and not a certificate in PEM "
            "that can be used: give the right one."
        ) from error
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.timezone.utc):
        raise FedkeelError(f"The certificate '{path}' expired on {certificate.not_valid_after_utc:%Y-%m-%d}: renew it.")


def make(directory: Path, sites: Sequence[str], hosts: Sequence[str], days: int = 365) -> None:
    """Write a set. What is there stays: run again with more sites, it only adds theirs."""
    for name in sites:
        if file_name(name) != name:
            raise FedkeelError(f"A site cannot be called {name!r}: its key is a file of that name.")
    authority, certificate = _authority(directory, days)
    server = directory / "server"
    if not (server / "server.pem").exists():
        _server(server, authority, certificate, hosts, days)
    _write(server / "ca.pem", _pem(certificate))
    for name in sites:
        folder = directory / "sites" / name
        if not (folder / "site.key").exists():
            _site(folder, server / "sites" / f"{name}.pub")
        _write(folder / "ca.pem", _pem(certificate))


def _authority(directory: Path, days: int) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    key_file, certificate_file = directory / "authority.key", directory / "server" / "ca.pem"
    if key_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        return key, x509.load_pem_x509_certificate(certificate_file.read_bytes())
    key = _new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Fedkeel trial authority")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        _certificate(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = _signed(builder, key)
    _write(key_file, _private(key), secret=True)
    _write(certificate_file, _pem(certificate))
    return key, certificate


def _server(folder: Path, authority: Any, issuer: Any, hosts: Sequence[str], days: int) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0][:64])])
    alternatives = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = (
        _certificate(name, issuer.subject, key.public_key(), days)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    _write(folder / "server.key", _private(key), secret=True)
    _write(folder / "server.pem", _pem(_signed(builder, authority)))


def _site(folder: Path, public: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = _new_key()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    _write(folder / "site.key", private, secret=True)
    _write(
        public,
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n",
    )


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _certificate(subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of sites differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _signed(builder: Any, key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA384())


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
