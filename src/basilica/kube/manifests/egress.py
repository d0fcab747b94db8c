"""The network rules of a run's pods: their permitted peers, as rules of network policies."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from basilica.core.errors import ValidationError

Json = dict[str, Any]

INTERNET, NOTHING = "internet", "none"
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
NODE_CREDENTIALS = "169.254.169.254/32"  # the clouds' metadata service, which has the node's credentials: not for ranks
NAME_PORTS = (53, 5353)  # of the Service, and of the pods behind it, which policies see: they may not bind 53


def networks(given: Sequence[str]) -> tuple[str, ...]:
    """Check `internet` and networks such as 10.20.0.0/16; `none` adds nothing."""
    return tuple(_network(each) for each in given if each != NOTHING)


def _network(given: str) -> str:
    if given == INTERNET:
        return given
    try:
        return str(ipaddress.ip_network(given))
    except ValueError as error:
        raise ValidationError("egress", given, f"names no network ({error}); say 10.20.0.0/16") from None


def rules_of_ranks(ranks: Mapping[str, str], rendezvous: Mapping[str, str], egress: Sequence[str]) -> Json:
    """Return the rules of ranks: each other, their rendezvous, DNS, and the networks of `egress`."""
    peers, keys = _pods(ranks), _pods(rendezvous)
    names = {"ports": [{"port": port, "protocol": protocol} for port in NAME_PORTS for protocol in ("UDP", "TCP")]}
    allowed: list[Json] = [{"to": [peers, keys]}, names]
    if egress:
        allowed.append({"to": [{"ipBlock": _block(network)} for network in egress]})
    return {"ingress": [{"from": [peers]}], "egress": allowed}


def rules_of_rendezvous(run: Mapping[str, str], control_namespace: str, port: int) -> Json:
    """Return the rules of a rendezvous: the pods of its run and the control plane may connect, and it connects to
    nobody.
    """
    control = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": control_namespace}}}
    asked = {"from": [_pods(run), control], "ports": [{"port": port, "protocol": "TCP"}]}
    return {"ingress": [asked], "egress": []}


def _pods(labels: Mapping[str, str]) -> Json:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _block(network: str) -> Json:
    if network == INTERNET:
        return {"cidr": "0.0.0.0/0", "except": [*PRIVATE_NETWORKS, NODE_CREDENTIALS]}
    return {"cidr": network}
