"""The command line of a rank on this machine, and the variables that it inherits from the server. Pure."""

from collections.abc import Mapping

from basilica.core import environment as env
from basilica.core.commands import expanded
from basilica.core.spec import DeploymentSpec, Exec, Shell

# Variables that a program needs of its machine. No other variable of the server's environment reaches a rank: the rest
# may contain the server's secrets.
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME", "TORCH_HOME",
})  # fmt: skip

# The published client ships a function as a script that writes it to this file. In a container each rank has its own;
# on one machine all ranks of all runs would overwrite it, so a file of the rank replaces it here.
SHIPPED_SOURCE = "/tmp/__basilica_source.py"
OWN_SOURCE = f'"${env.CHECKPOINT_DIR}/../results/${env.RANK}.source.py"'


def command_line(spec: DeploymentSpec) -> list[str]:
    match spec.program:
        case Shell(script, args):
            return ["/bin/sh", "-c", script.replace(SHIPPED_SOURCE, OWN_SOURCE), "--", *args]
        case Exec(argv):
            return list(argv)


def own_command_line(spec: DeploymentSpec, environment: Mapping[str, str]) -> list[str] | None:
    """Return the command line with the rank's own values in it; None if it has no place for any.

    A name without a value stays as it is, and so does a secret's: other users can see command lines.
    """

    match spec.program:
        case Exec(argv) if any("$" in part for part in argv):
            hidden = {name for name, value in spec.secrets.items() if environment.get(name) == value}
            return expanded(argv, environment, hidden)
    return None


def machine_environment(server: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the server's environment that ranks inherit."""
    return {name: value for name, value in server.items() if name in INHERITED}
