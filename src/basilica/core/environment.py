"""The environment of ranks: the name of each of our variables, once, and the values that every runtime gives. Pure.

Modules import this one as `env`: `env.RANK` is the name of a variable. Files that travel alone, or that programs of
users import, spell the names that they need: `mesh.py`, `reports/writer.py`, `progress/notices.py`,
`progress/progress.py`, `shipping/bootstrap.py` and `rendezvous/torch_*.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names alone are wanted by programs that start quickly
    from collections.abc import Callable, Mapping, Sequence

    from basilica.core.spec import DeploymentSpec

# ---- what every rank is given: docs/reference/environment.md ---------------------------------------------------------

RANK = "BASILICA_RANK"
ATTEMPT = "BASILICA_ATTEMPT"
DEPLOYMENT = "BASILICA_DEPLOYMENT"
NAME = "BASILICA_NAME"
WORLD_MIN = "BASILICA_WORLD_MIN"
WORLD_TARGET = "BASILICA_WORLD_TARGET"
WORLD_MAX = "BASILICA_WORLD_MAX"
GPUS_PER_POD = "BASILICA_GPUS_PER_POD"
RENDEZVOUS_ENDPOINT = "BASILICA_RDZV_ENDPOINT"
RENDEZVOUS_ID = "BASILICA_RDZV_ID"
RENDEZVOUS_BACKEND = "BASILICA_RDZV_BACKEND"
CHECKPOINT_DIR = "BASILICA_CHECKPOINT_DIR"
RESULT_FILE = "BASILICA_RESULT_FILE"
REPORT_FILE = "BASILICA_REPORT_FILE"
REPORT_BELL = "BASILICA_REPORT_BELL"
NOTICE_FILE = "BASILICA_NOTICE_FILE"
SNAPSHOT_DIR = "BASILICA_SNAPSHOT_DIR"
CHECKPOINT_URI = "BASILICA_CHECKPOINT_URI"
RESUME_FROM = "BASILICA_RESUME_FROM"
RESUME_STEP = "BASILICA_RESUME_STEP"
PATH_SEPARATOR = ":"  # `os.pathsep` where ranks run
NODE_NAME = "NODE_NAME"

TORCH_RANK = "RANK"
TORCH_WORLD_SIZE = "WORLD_SIZE"
TORCH_LOCAL_RANK = "LOCAL_RANK"
TORCH_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# ---- what the entrypoint in a container reads ------------------------------------------------------------------------

DRIVEN = "BASILICA_DRIVEN"
FENCE = "BASILICA_FENCE"
POD_UID = "BASILICA_POD_UID"
HOST_ADDRESS = "BASILICA_HOST_ADDRESS"
MESH_TIMEOUT = "BASILICA_MESH_TIMEOUT"
NOTICE_SECONDS = "BASILICA_NOTICE_SECONDS"
NOTICE_SIGNAL = "BASILICA_NOTICE_SIGNAL"
GRACE_SECONDS = "BASILICA_GRACE_SECONDS"
MAX_RESTARTS = "BASILICA_MAX_RESTARTS"
EXIT_FILE = "BASILICA_EXIT_FILE"
RANK_ENV = "BASILICA_RANK_ENV"
SCRATCH = "BASILICA_SCRATCH"
MEMORY_EVENTS = "BASILICA_MEMORY_EVENTS"
TERMINATION_LOG = "BASILICA_TERMINATION_LOG"
ARCHIVE = "BASILICA_ARCHIVE"
ARCHIVE_PARTS = "BASILICA_ARCHIVE_PARTS"
ARCHIVE_SENT = "BASILICA_ARCHIVE_SENT"
ARCHIVE_UNPACKED = "BASILICA_ARCHIVE_UNPACKED"
ARCHIVE_WORKDIR = "BASILICA_ARCHIVE_WORKDIR"

# ---- marks by which processes are found, and what the bench probe and shipped source read ---------------------------

COMMAND_MARK = "BASILICA_EXEC"  # of a command that was started beside a rank, and of all that it started
BENCH_DIR = "BASILICA_BENCH_DIR"
BENCH_TOKEN = "BASILICA_BENCH_TOKEN"
SOURCE = "BASILICA_SOURCE"

# ---- settings of commands, clients and servers ----------------------------------------------------------------------

STATE_DIR = "BASILICA_STATE_DIR"
API_URL = "BASILICA_API_URL"
API_TOKEN = "BASILICA_API_TOKEN"
API_KEY = "BASILICA_API_KEY"
IDLE_EXIT = "BASILICA_IDLE_EXIT"
KUBECONFIG = "BASILICA_KUBECONFIG"
NAMESPACE = "BASILICA_NAMESPACE"
IMAGE = "BASILICA_IMAGE"

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun with c10d: else a scale-up fails all agents after 60 s
}
"""Values that a user may replace."""


def resume_environment(spec: "DeploymentSpec", places: "Callable[[str], Sequence[str]]") -> dict[str, str]:
    """The variables of a run that goes on from an earlier one. `places`: the snapshot directories of that instance."""
    if spec.resume_from is None:
        return {}
    from basilica.core.resume import parse_resume  # noqa: PLC0415 - the names alone are wanted by most

    found = parse_resume(spec.resume_from)
    step = {} if found.step is None else {RESUME_STEP: str(found.step)}
    return {RESUME_FROM: PATH_SEPARATOR.join(places(found.run)), **step}


def user_environment(spec: "DeploymentSpec") -> dict[str, str]:
    """The variables that the user asked for; secrets win over `env`, and `env` over NCCL's settings."""
    return {**spec.nccl_env, **spec.env, **spec.secrets}


def run_environment(
    spec: "DeploymentSpec",
    instance: str,
    *,
    machine: "Mapping[str, str]",
    user: "Mapping[str, str]",
    master: tuple[str, int],
    rendezvous: str,
    checkpoints: str,
    snapshots: str,
) -> dict[str, str]:
    """The variables that all ranks of a run share. Later ones win: the machine's, ours by default, the user's, the
    contract's."""
    return {
        **machine,
        **DEFAULTS,
        MASTER_ADDR: master[0],
        MASTER_PORT: str(master[1]),
        **user,
        TORCH_LOCAL_RANK: "0",
        DEPLOYMENT: instance,
        NAME: spec.name,
        WORLD_MIN: str(spec.world.min),
        WORLD_TARGET: str(spec.world.target),
        WORLD_MAX: str(spec.world.max),
        GPUS_PER_POD: str(max(1, spec.resources.gpus.count)),
        RENDEZVOUS_ENDPOINT: rendezvous,
        RENDEZVOUS_ID: instance,
        RENDEZVOUS_BACKEND: spec.rendezvous_backend,
        CHECKPOINT_DIR: checkpoints,
        SNAPSHOT_DIR: snapshots,
        **({} if spec.checkpoint_uri is None else {CHECKPOINT_URI: spec.checkpoint_uri}),
    }


def attempt_environment(
    rank: int, attempt: int, world_size: int, *, result_file: str, error_file: str
) -> dict[str, str]:
    """The variables of one attempt of a rank."""
    return {
        TORCH_RANK: str(rank),
        TORCH_WORLD_SIZE: str(world_size),
        RANK: str(rank),
        ATTEMPT: str(attempt),
        RESULT_FILE: result_file,
        TORCH_ERROR_FILE: error_file,
    }
