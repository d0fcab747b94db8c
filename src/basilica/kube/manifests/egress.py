"""Whom the pods of a run may speak to, as the rules of network policies."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from basilica.core.errors import ValidationError

Json = dict[str, Any]

INTERNET, NOTHING = "internet", "none"
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
NODE_CREDENTIALS = "169.254.169.254/32"  # where clouds tell a machine who it is; a rank is not its machine
NAME_PORTS = (53, 5353)  # of the Service, and of pods behind it that may not have the first: policies see pods


def networks(told: Sequence[str]) -> tuple[str, ...]:
    """`internet` and networks such as 10.20.0.0/16, checked; `none` adds nothing."""
    return tuple(_network(each) for each in told if each != NOTHING)


def _network(told: str) -> str:
    if told == INTERNET:
        return told
    try:
        return str(ipaddress.ip_network(told))
    except ValueError as error:
        raise ValidationError("egress", told, f"names no network ({error}); say 10.20.0.0/16") from None


def rules_of_ranks(ranks: Mapping[str, str], rendezvous: Mapping[str, str], egress: Sequence[str]) -> Json:
    """Each other, their rendezvous, names, and what `egress` tells of the world outside."""
    peers, keys = _pods(ranks), _pods(rendezvous)
    names = {"ports": [{"port": port, "protocol": protocol} for port in NAME_PORTS for protocol in ("UDP", "TCP")]}
    allowed: list[Json] = [{"to": [peers, keys]}, names]
    if egress:
        allowed.append({"to": [{"ipBlock": _block(network)} for network in egress]})
    return {"ingress": [{"from": [peers]}], "egress": allowed}


def rules_of_rendezvous(run: Mapping[str, str], control_namespace: str, port: int) -> Json:
    """It is asked by the pods of its run and by the control plane, and asks nobody."""
    control = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": control_namespace}}}
    asked = {"from": [_pods(run), control], "ports": [{"port": port, "protocol": "TCP"}]}
    return {"ingress": [asked], "egress": []}


def _pods(labels: Mapping[str, str]) -> Json:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _block(network: str) -> Json:
    if network == INTERNET:
        return {"cidr": "0.0.0.0/0", "except": [*PRIVATE_NETWORKS, NODE_CREDENTIALS]}
    return {"cidr": network}
