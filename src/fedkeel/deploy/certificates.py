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
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedkeel.core.naming import file_name
from fedkeel.errors import FedkeelError

HOST = re.compile(r"(\*\.)?\w([\w.-]*\w)?", re.ASCII)
PEM, OPENSSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH


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
        certificate = read_certificate("certificate of the server", self.certificate, "give the right one")
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.timezone.utc):
            day = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
            raise FedkeelError(f"The certificate '{self.certificate}' expired on {day}: renew it.")
        self._check_handshake(self._own_context())
        if not any(self.sites.glob("*.pub")):
            raise FedkeelError(f"There are no public keys of sites in '{self.sites}': put NAME.pub of each site there.")

    def _own_context(self) -> ssl.SSLContext:
        """With the key, which must be that of the certificate."""
        context, password = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), iter([""])
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: next(password))
        except ssl.SSLError as error:
            if next(password, None) is None:  # it was asked for
                problem = "is locked with a password, which nobody can type for it: give one without"
            elif error.reason == "KEY_VALUES_MISMATCH":
                problem = f"is not that of the certificate '{self.certificate}': give the one it was made with"
            else:
                problem = f"{not_what_it_should_be(self.key, 'a private key in PEM')}: give the one of the certificate"
            raise FedkeelError(f"The key of the server, '{self.key}', {problem}.") from error
        return context

    def _check_handshake(self, server: ssl.SSLContext) -> None:
        """A certificate of another authority is found before any site comes, by shaking hands with oneself."""
        site = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        site.check_hostname = False
        site.load_verify_locations(cafile=str(self.ca))
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = site.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
        try:
            for end in ends * 4:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason
            raise FedkeelError(
                f"No site that has '{self.ca}' would trust the certificate '{self.certificate}' ({reason}): "
                "give the certificate of the authority that signed it."
            ) from error


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
        found, the_key = content("key of this site", self.key), f"The key of this site, '{self.key}',"
        make_one = "make one with \"ssh-keygen -t ecdsa -b 384 -N '' -f site.key\""
        try:
            key = serialization.load_ssh_private_key(found, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if "assword" in str(error):
                raise FedkeelError(
                    f"{the_key} is locked with a password, which nobody can type for it: "
                    "remove it with \"ssh-keygen -p -N '' -f site.key\"."
                ) from error
            problem = not_what_it_should_be(self.key, "a private key in OpenSSH's format")
            raise FedkeelError(f"{the_key} {problem}: {make_one}.") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise FedkeelError(f"{the_key} is not of a NIST curve: {make_one}.")


def content(what: str, path: Path) -> bytes:
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


def not_what_it_should_be(path: Path, wanted: str) -> str:
    found = path.read_bytes()
    kind = "something else"
    if b"PRIVATE KEY-----" in found:
        kind = "a private key" + (" of another format" if b"OPENSSH" not in found else "")
    elif b"BEGIN CERTIFICATE-----" in found:
        kind = "a certificate" if b"END CERTIFICATE-----" in found else "half a certificate"
    elif found.startswith((b"ecdsa-", b"ssh-", b"sk-")) or b"PUBLIC KEY-----" in found:
        kind = "a public key"
    return f"is {kind} and not {wanted} that can be used"


def check_authority(path: Path) -> None:
    read_certificate("certificate of the authority", path, "ask the server's operator for ca.pem", trusted=True)


def read_certificate(what: str, path: Path, advice: str, *, trusted: bool = False) -> x509.Certificate:
    """The first one in a file; `trusted`: all of them, as TLS takes them for those of authorities."""
    found = content(what, path)
    try:
        if trusted:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=str(path))
            return x509.load_pem_x509_certificates(found)[0]
        return x509.load_pem_x509_certificate(found)
    except (ValueError, ssl.SSLError) as error:
        problem = not_what_it_should_be(path, "a certificate in PEM")
        raise FedkeelError(f"The {what}, '{path}', {problem}: {advice}.") from error


def make(directory: Path, sites: Sequence[str], hosts: Sequence[str], days: int = 365) -> None:
    """Write a set. What is there stays: run again with more sites, it only adds theirs."""
    for name in sites:
        if file_name(name) != name:
            raise FedkeelError(f"A site cannot be called {name!r}: its key is a file of that name.")
    for host in hosts:
        with suppress(ValueError):
            ipaddress.ip_address(host)
            continue
        if not HOST.fullmatch(host):
            raise FedkeelError(f"'host' is '{host}', which is no name or address of a machine: give its own.")
    authority, certificate = _authority(directory, days)
    server = directory / "server"
    if not (server / "server.pem").exists():
        _server(server, authority, certificate, hosts, days)
    _write(server / "ca.pem", certificate.public_bytes(PEM))
    for name in sites:
        folder = directory / "sites" / name
        if not (folder / "site.key").exists():
            key = ec.generate_private_key(ec.SECP384R1())
            public = key.public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)
            _write_key(folder / "site.key", key, serialization.PrivateFormat.OpenSSH)
            _write(server / "sites" / f"{name}.pub", public + b"\n")
        _write(folder / "ca.pem", certificate.public_bytes(PEM))


def _authority(directory: Path, days: int) -> tuple[Any, x509.Certificate]:
    key_file, certificate_file = directory / "authority.key", directory / "server" / "ca.pem"
    if key_file.exists():
        known = serialization.load_pem_private_key(key_file.read_bytes(), None)
        return known, x509.load_pem_x509_certificate(certificate_file.read_bytes())
    key, name = ec.generate_private_key(ec.SECP384R1()), _name("Fedkeel trial authority")
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    critical = (x509.BasicConstraints(ca=True, path_length=0), usage)
    further = (x509.SubjectKeyIdentifier.from_public_key(key.public_key()),)
    certificate = _sign(_certificate(name, name, key, days), key, critical, further)
    _write_key(key_file, key)
    _write(certificate_file, certificate.public_bytes(PEM))
    return key, certificate


def _server(folder: Path, authority: Any, issuer: x509.Certificate, hosts: Sequence[str], days: int) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    further = (
        x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    )
    unsigned = _certificate(_name(hosts[0][:64]), issuer.subject, key, days)
    certificate = _sign(unsigned, authority, (x509.BasicConstraints(ca=False, path_length=None),), further)
    _write_key(folder / "server.key", key)
    _write(folder / "server.pem", certificate.public_bytes(PEM))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))  # clocks of sites differ
    return builder.not_valid_after(now + datetime.timedelta(days=days))


def _sign(builder: x509.CertificateBuilder, key: Any, critical: Sequence[Any], further: Sequence[Any]) -> Any:
    for extension in (*critical, *further):
        builder = builder.add_extension(extension, critical=extension in critical)
    return builder.sign(key, hashes.SHA384())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: Any, form: Any = serialization.PrivateFormat.PKCS8) -> None:
    _write(path, key.private_bytes(PEM, form, serialization.NoEncryption()), mode=0o600)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
