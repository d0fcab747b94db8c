"""What a rank finds in its environment, and the command line it is executed with. Pure."""

from collections.abc import Mapping

from basilica.core.actions import Launch
from basilica.core.commands import expanded
from basilica.core.spec import DeploymentSpec, Exec, Shell
from basilica.ports import Run

# What a program needs of the machine it runs on. Nothing else of the server's environment reaches a rank: the rest may
# hold the server's secrets.
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME", "TORCH_HOME",
})  # fmt: skip

# The published client ships a function as a script that writes it to this file. That is a rank's own in a container; on
# one machine all ranks of all runs would overwrite it under each other, so here it stands for a file of the rank.
SHIPPED_SOURCE = "/tmp/__basilica_source.py"
OWN_SOURCE = '"$BASILICA_CHECKPOINT_DIR/../results/$BASILICA_RANK.source.py"'


def command_line(spec: DeploymentSpec) -> list[str]:
    match spec.program:
        case Shell(script, args):
            return ["/bin/sh", "-c", script.replace(SHIPPED_SOURCE, OWN_SOURCE), "--", *args]
        case Exec(argv):
            return list(argv)


def own_command_line(spec: DeploymentSpec, environment: Mapping[str, str]) -> list[str] | None:
    """The command line with the rank's own values in it; None if there is no place for any.

    A name without a value stays as it is, and so does a secret's: others can see command lines.
    """

    match spec.program:
        case Exec(argv) if any("$" in part for part in argv):
            hidden = {name for name, value in spec.secrets.items() if environment.get(name) == value}
            return expanded(argv, environment, hidden)
    return None


def common_environment(
    run: Run, *, master: tuple[str, int], rendezvous: str, server: Mapping[str, str], checkpoints: str
) -> dict[str, str]:
    """What all ranks of a run share. Later lines win: the machine's, the user's, then the contract."""
    spec = run.spec
    return {
        **{name: value for name, value in server.items() if name in INHERITED},
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun with c10d: else a scale-up fails all agents after 60 s
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        **spec.nccl_env,
        **spec.env,
        **spec.secrets,
        "LOCAL_RANK": "0",
        "BASILICA_DEPLOYMENT": run.instance,
        "BASILICA_NAME": spec.name,
        "BASILICA_WORLD_MIN": str(spec.world.min),
        "BASILICA_WORLD_TARGET": str(spec.world.target),
        "BASILICA_WORLD_MAX": str(spec.world.max),
        "BASILICA_GPUS_PER_POD": str(max(1, spec.resources.gpus.count)),
        "BASILICA_RDZV_ENDPOINT": rendezvous,
        "BASILICA_RDZV_ID": run.instance,
        "BASILICA_RDZV_BACKEND": spec.rendezvous_backend,
        "BASILICA_CHECKPOINT_DIR": checkpoints,
    }


def rank_environment(launch: Launch, node: str, visible_gpus: str | None, result_file: str) -> dict[str, str]:
    """What is this attempt's own. `visible_gpus` None: whatever the machine has, which is nothing."""
    own = {
        "NODE_NAME": node,
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "BASILICA_RANK": str(launch.rank),
        "BASILICA_ATTEMPT": str(launch.attempt),
        "BASILICA_RESULT_FILE": result_file,
    }
    if visible_gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = visible_gpus
    return own
