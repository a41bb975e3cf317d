"""Choose the network interface that reaches the other hosts.

By itself gloo chooses the interface of the host's own name. This is often the loopback, because Debian writes the name
into /etc/hosts, and two hosts cannot connect over the loopback.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

VARIABLE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def choose_interface() -> None:
    """Tell gloo the interface that reaches host 0, if there are several hosts and the user names no interface."""
    several = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if several and VARIABLE not in os.environ and (name := interface_towards(os.environ["MASTER_ADDR"])):
        os.environ[VARIABLE] = name


def interface_towards(host: str) -> str:
    """Name of the interface for packets to `host`; empty for the loopback, or if none is found.

    host: a name or an IPv4 address; it may belong to this host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing; the system only looks up the route
        except OSError:
            return ""
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return ""
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), "")


def _address_of(interface: str, probe: socket.socket) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # the interface has no address
        return ""
    return socket.inet_ntoa(answer[20:24])
