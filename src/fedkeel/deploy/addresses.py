"""Where a server listens and a site connects to, and what can be said of it before anything is sent."""

import ipaddress
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

from fedkeel.errors import FedkeelError

NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")  # what OpenSSL calls other languages
NOT_YET_VALID, EXPIRED = 9, 10  # OpenSSL's numbers


def refuse_beyond_loopback(host: str) -> None:
    """Nothing goes without TLS and keys over anything but this machine."""
    with suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    raise FedkeelError(
        f"'--insecure' is for this machine alone, and '{host}' is not a loopback address: "
        "give certificates, see 'fedkeel certificates --help'."
    )


def refuse_untrusted(host: str, port: int, ca: Path | None) -> None:
    """What will not get better by waiting is told at once: a certificate that is expired, made out to another name or
    signed by another authority, TLS at one end alone. A server that is not there yet is waited for."""
    where = f"{host}:{port}"
    if ca is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = ssl.create_default_context(cafile=str(ca))
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message
        if error.verify_code in (NOT_YET_VALID, EXPIRED):
            reason += f", and the clock here says {time.strftime('%Y-%m-%d %H:%M')}"
        raise FedkeelError(
            f"The certificate of {where} is not trusted ({reason}): ask the server's operator, and check --ca."
        ) from error
    except ssl.SSLError as error:
        if ca is not None and error.reason in NOT_TLS:
            raise FedkeelError(
                f"The server at {where} does not use TLS, as one with '--insecure', and this site has certificates: "
                "have the server started with certificates."
            ) from error
    except OSError:
        pass
    else:
        if ca is None:
            raise FedkeelError(
                f"The server at {where} uses TLS, and this site was started with '--insecure': "
                "give '--certificates' in its place."
            )


def refuse_taken(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FedkeelError(
                f"The server cannot listen at {host}:{port}: {error.strerror}; choose another --port."
            ) from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
