"""Addresses of the form `host:port`, and which of them this machine may listen on."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError, TPUDistributedError

LARGEST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """A host name or IP address with a port; `str()` is the form that jax and gRPC accept."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, what: str = "coordinator_address") -> "Address":
        """Read `host:port` or `[ipv6]:port`.

        Raises:
            ConfigError: The text has another form, or the port is out of range.
        """
        form = f"{what} {text!r} is not of the form host:port, like '10.0.0.1:8482'"
        host, colon, port = text.rpartition(":")
        if "/" in text:
            raise ConfigError(f"{form}; leave out the scheme and the path.")
        if not colon or not host:
            raise ConfigError(f"{form}; add what is missing.")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if bracketed != (":" in host) or any(sign in host for sign in "[] \t\n"):
            raise ConfigError(f"{form}; write an IPv6 address in brackets, like '[::1]:8482'.")
        if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= LARGEST_PORT:
            raise ConfigError(f"{form}; the port must be a number from 1 to {LARGEST_PORT}.")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether listening on this address means listening on every network of the machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def resolved(self) -> "Address":
        """Return the address with the host replaced by the IP address it resolves to.

        IPv4 comes first, so that 'localhost' means the same on every host.

        Raises:
            TPUDistributedError: The name does not resolve here.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TPUDistributedError(
                f"The name {self.host!r} does not resolve on this machine ({error.strerror}); "
                "use host 0's IP address, or a name that every host can resolve."
            ) from error
        first = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return Address(str(first[4][0]), self.port)


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address is this machine itself."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def names_this_machine(host_header: str) -> bool:
    """Whether the Host header of a request names this machine.

    A web page elsewhere can point its own host name at 127.0.0.1, and a browser then sends that
    name. So a server on a loopback address answers only to its own names.
    """
    end = host_header.find("]") + 1 if host_header.startswith("[") else host_header.find(":")
    return is_loopback(host_header if end < 0 else host_header[:end])


def listen(address: Address) -> socket.socket:
    """Listen on `address`, an IP address of this machine.

    Raises:
        TPUDistributedError: The port is in use, or the address is another machine's.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A port whose last job has just ended may be used at once. SO_REUSEPORT stays off: with it,
    # as gRPC sets it, a second coordinator would silently share the port with a running one.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TPUDistributedError(_why_not(error, address)) from error
    return listener


def _why_not(error: OSError, address: Address) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {address.port} on {address.host} is in use, so the coordinator cannot listen "
            "there; end the job that holds it, or give every host another port."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{address.host} is not an address of this machine, so host 0's coordinator cannot "
            "listen there; start host 0 on that machine, or, if it is reached through a "
            f"forwarding, pass bind_address='0.0.0.0:{address.port}'."
        )
    if error.errno == errno.EACCES:
        return (
            f"Listening on port {address.port} of {address.host} is not permitted "
            f"({error.strerror}); use a port above 1023."
        )
    return f"The coordinator cannot listen on {address} ({error.strerror}); use another address."


FIRST_PERSON, NOBODY = 1000, 65534
"""User ids from the first up to the second are people's, as Linux is usually set up."""
_NO_LOGIN = ("nologin", "false")


def people() -> set[int]:
    """Return the user ids of people with an account or a process on this machine."""
    found = {os.getuid(), *_accounts(), *_owners()}
    return {uid for uid in found if FIRST_PERSON <= uid < NOBODY}


def _accounts() -> Iterable[int]:
    import pwd

    for account in pwd.getpwall():
        if not account.pw_shell.endswith(_NO_LOGIN):
            yield account.pw_uid


def _owners() -> Iterable[int]:
    """Yield the owners of processes; a directory service's accounts are in no local list."""
    import psutil

    for process in psutil.process_iter():
        try:
            yield process.uids().real
        except psutil.Error:
            continue
