"""The network interface through which nodes reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket

# An address that nobody has (RFC 5737), beyond every router.
_FAR_AWAY = "192.0.2.1"
_KEYS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def choose_interface() -> str | None:
    """Name the interface that leads to the other nodes to Gloo and NCCL, unless the user has.

    Gloo listens where the host name resolves to, which Debian makes the loopback; ranks of other
    nodes then do not find it.

    Returns:
        The interface; None on one node, or where it cannot be told.
    """
    master = os.environ.get("MASTER_ADDR")
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    if master is None or int(os.environ.get("WORLD_SIZE", "1")) <= int(local):
        return None
    import psutil

    own = _address_towards(master)
    if own is None or ipaddress.ip_address(own).is_loopback:  # the master itself, by its name
        own = _address_towards(_FAR_AWAY)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        (name, text)
        for name, addresses in psutil.net_if_addrs().items()
        for text in (each.address.partition("%")[0] for each in addresses)
        if name in up and _is_address(text) and not ipaddress.ip_address(text).is_loopback
    ]
    names = dict.fromkeys(name for name, text in found if own is None or text == own)
    if len(names) != 1:
        return None
    (name,) = names
    for key in _KEYS:
        os.environ.setdefault(key, name)
    return name


def _address_towards(host: str) -> str | None:
    """Return this machine's address on the route to a host; None without one."""
    try:
        family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # of a datagram socket: sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
