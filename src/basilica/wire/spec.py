"""The options of a run: one table with the place of each in the core's spec, in a body, and among the SDK's keywords.

The request of the SDK, the REST API, the custom resource, its definition, the reference and the names in error messages
are made from it. Whether a value is a text or a number, its limits, its choices and its default are those of the
attribute in the core. To add an option: an attribute in `core.spec`, a row here, and a keyword in `client.options`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from basilica.core.errors import ValidationError
from basilica.core.names import NAME_MAX, NAME_PATTERN
from basilica.core.resume import RESUME_MAX, RESUME_PATTERN
from basilica.core.spec import (
    ARG_BYTES_MAX,
    DIGEST_PATTERN,
    LABEL_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    URI_PATTERN,
    BenchOnStart,
    DeploymentSpec,
    Exec,
    Shell,
)
from basilica.wire.forms import BYTES, CORES, Choice, Form, Text, Texts, form_of

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One option in all its places: `attribute` of the spec and `path` in a body, both dotted."""

    attribute: str
    path: str
    about: str
    keyword: str = ""  # of the SDK, where it is not the attribute
    form: Form | None = None  # where it does not follow from the attribute's type
    default: Any = None  # where the attribute is joint with others, and has none of its own
    in_sdk: bool = True

    @property
    def name(self) -> str:
        """The option's keyword in the SDK."""
        return self.keyword or self.attribute


_ARGS = Texts(ARG_BYTES_MAX, 1024)
_SIZE = "distributed.worldSize"
# fmt: off
TABLE: tuple[Option, ...] = (
    Option("name", "instanceName", "What the run is called.", form=Text(NAME_MAX, NAME_PATTERN)),
    Option("image", "image", "The image that ranks run in."),
    Option("program.argv", "command", "The program and its arguments, executed as they stand.", "command", _ARGS),
    Option("program.args", "args", "More arguments, or $1… of `distributed.command`.", "args", _ARGS),
    Option("port", "port", "A port that ranks may use among themselves."),
    Option("env", "env", "Variables of the ranks."),
    Option("secrets", "secrets", "Variables of the ranks that are shown nowhere."),
    Option("workdir", "workdir", "The directory that ranks run in."),
    Option("archive", "workdirArchive", "The SHA-256 of an archive that was sent to the API.", "workdir",
           Text(64, DIGEST_PATTERN)),
    Option("resources.cpu", "resources.cpu", "Cores of each rank: 8, 0.5, 500m.", "cpu", CORES),
    Option("resources.memory_bytes", "resources.memory", "Memory of each rank: 32Gi, 512Mi, 2G.", "memory", BYTES),
    Option("resources.gpus.count", "resources.gpus.count", "How many GPUs each rank has.", "gpu_count"),
    Option("resources.gpus.models", "resources.gpus.model", "GPU models that will do; empty: any.", "gpu_models"),
    Option("resources.gpus.min_memory_gb", "resources.gpus.minGpuMemoryGb", "The least memory of each GPU.",
           "min_gpu_memory_gb"),
    Option("ttl_seconds", "ttlSeconds", "Cancel the run so long after its creation; 0: never."),
    Option("world.min", f"{_SIZE}.min", "The fewest ranks to train with.", "world_size.min"),
    Option("world.target", f"{_SIZE}.target", "How many ranks are wanted now.", "world_size.target"),
    Option("world.max", f"{_SIZE}.max", "The most ranks.", "world_size.max"),
    Option("program.script", "distributed.command", "A script for /bin/sh.", "command", Text(SCRIPT_BYTES_MAX)),
    Option("rendezvous_backend", "distributed.rendezvous.backend", "What ranks meet at."),
    Option("rendezvous_port", "distributed.rendezvous.port", "Where it listens, if that matters.", in_sdk=False),
    Option("provider_filter.include", "distributed.providerFilter.include", "Only these providers; empty: any."),
    Option("provider_filter.exclude", "distributed.providerFilter.exclude", "None of these providers."),
    Option("topology_spread", "distributed.topologySpread.strategy", "How ranks are spread."),
    Option("nccl_env", "distributed.nccl.env", "Variables of NCCL that go before our own."),
    Option("bench.mode", "distributed.bench.mode", "Whether the network is measured when the run starts.", "bench",
           Choice(("off", "on-start")), "off"),
    Option("bench.placement", "distributed.bench.placement",
           "Whether it may be measured on other nodes: preferred or strict.", "bench_placement", Text(256)),
    Option("resize", "distributed.resize", "Whether running ranks stay when the size changes."),
    Option("on_stall", "distributed.onStall", "What happens to a rank that has stopped reporting."),
    Option("max_restarts", "distributed.maxRestarts", "How often a failed rank starts again."),
    Option("grace_seconds", "distributed.graceSeconds", "How long a rank may take to stop: from SIGTERM to SIGKILL."),
    Option("notice_seconds", "distributed.noticeSeconds",
           "How long a planned change waits for ranks that read notices to be ready for it."),
    Option("notice_signal", "distributed.noticeSignal", "A signal that ranks get when a planned change is announced."),
    Option("deadline_seconds", "distributed.deadlineSeconds", "Fail the run if it takes longer; 0: no deadline."),
    Option("start_deadline_seconds", "distributed.startDeadlineSeconds",
           "Fail the run if it is not up by then; 0: no deadline."),
    Option("checkpoint_uri", "distributed.checkpointUri",
           "A bucket or directory that keeps snapshots as well: s3://, gs://, az:// or file://.",
           form=Text(LABEL_BYTES_MAX, URI_PATTERN)),
    Option("resume_from", "distributed.resumeFrom",
           "The earlier run that this one goes on from: RUN, or RUN@STEP.", form=Text(RESUME_MAX, RESUME_PATTERN)),
)
# fmt: on
GROUPS: Mapping[str, str] = {
    "resources": "What each rank needs.",
    "resources.gpus": "GPUs of each rank.",
    "distributed": "The gang. `command` is a script for /bin/sh; "
    "without it the top-level `command` list is executed as it stands.",
    _SIZE: "How many ranks: wanted now (target), the fewest to train with (min), the most (max).",
    "distributed.rendezvous": "How ranks meet.",
    "distributed.providerFilter": "Which providers' nodes may be used.",
    "distributed.topologySpread": "How near ranks are.",
    "distributed.nccl": "Of NCCL.",
    "distributed.bench": "Measures the link between two of the run's nodes.",
}
AUTO = "auto"  # another control plane's word for a command of its own choice; here the same as none
NOTHING_TO_RUN = "there is nothing to run: give a command (an image's own entrypoint is not known here)"
PLACEMENTS = Choice(
    get_args(get_type_hints(BenchOnStart)["placement"])
)  # which are of no interest while the bench is off


# ---- attributes that several places of a body make together ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joint:
    read: Callable[[Json], Any]
    write: Callable[[Any], Json]


def _read_program(given: Json) -> Shell | Exec:
    script, argv, args = given.get("script"), given.get("argv", ()), given.get("args", ())
    if script and script != AUTO:
        return Shell(script, (*argv, *args))
    if argv:
        return Exec((*argv, *args))
    raise ValidationError("program.script", script, NOTHING_TO_RUN)


def _write_program(program: Shell | Exec) -> Json:
    match program:
        case Shell(script, args):
            return {"script": script} | ({"args": args} if args else {})
        case Exec(argv):
            return {"argv": argv}


def _read_bench(given: Json) -> BenchOnStart | None:
    """Read the bench's options. With the bench off, its placement is ignored."""
    if given.get("mode", "off") == "off":
        return None
    if "placement" not in given:
        return BenchOnStart()
    placement: Any = PLACEMENTS.read(given["placement"], "bench.placement")
    return BenchOnStart(placement)


def _write_bench(bench: BenchOnStart | None) -> Json:
    return {"mode": "off"} if bench is None else {"mode": "on-start", "placement": bench.placement}


JOINTS: Mapping[str, Joint] = {
    "program": Joint(_read_program, _write_program),
    "bench": Joint(_read_bench, _write_bench),
}


# ---- to and from a body ----------------------------------------------------------------------------------------------


def to_body(spec: DeploymentSpec, table: Sequence[Option] = TABLE) -> Json:
    """Write a spec with its defaults: a later version's other defaults do not change a run."""
    joint = {name: joint.write(getattr(spec, name)) for name, joint in JOINTS.items()}
    body: Json = {}
    for option in table:
        head, _, rest = option.attribute.partition(".")
        value = joint[head].get(rest) if head in joint else _getter(option.attribute)(spec)
        if value is not None:
            put(body, option.path, form(option, type(spec)).write(value))
    return body


def from_body(
    body: Json,
    table: Sequence[Option] = TABLE,
    spec: type[DeploymentSpec] = DeploymentSpec,
    **beside: Any,
) -> DeploymentSpec:
    """Read the spec of a body, with `beside` for absent attributes; `ValidationError` names the path in the body."""
    given: Json = {}
    for option in table:
        value = _at(body, option.path)
        if value is not None:
            given[option.attribute] = form(option, spec).read(value, option.path)
        elif default(option, spec) is MISSING:
            raise ValidationError(option.path, None, "is needed")
    try:
        made: DeploymentSpec = _made(spec, given, JOINTS, beside)
    except ValidationError as error:
        raise renamed(error, lambda attribute: wire_name(attribute, table)) from None
    return made


def _made(kind: type, given: Json, joints: Mapping[str, Joint], beside: Json) -> Any:
    """Build a value of the core from its dotted attributes, the innermost values first."""
    own: Json = dict(beside)
    below: dict[str, Json] = {name: {} for name in joints}
    for attribute, value in given.items():
        name, dot, rest = attribute.partition(".")
        if dot:
            below.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    for name, parts in below.items():
        own[name] = joints[name].read(parts) if name in joints else _made(_hints(kind)[name], parts, {}, {})
    return kind(**own)


def put(body: Json, path: str, value: Any) -> None:
    *parents, last = _split(path)
    for parent in parents:
        body = body.setdefault(parent, {})
    body[last] = value


def _at(body: Any, path: str) -> Any:
    """Return the value at that path; None if there is none."""
    for depth, part in enumerate(_split(path)):
        if body is None:
            return None
        if not isinstance(body, dict):
            raise ValidationError(".".join(_split(path)[:depth]) or "body", type(body).__name__, "must be an object")
        body = body.get(part)
    return body


_split = cache(lambda path: tuple(path.split(".")))  # a body is read and written for every change of a run
_getter = cache(attrgetter)


# ---- forms and defaults from the core's types ------------------------------------------------------------------------


def form(option: Option, spec: type = DeploymentSpec) -> Form:
    """Return the form of the option's value in a body."""
    return option.form or _form(spec, option.attribute)


def default(option: Option, spec: type = DeploymentSpec) -> Any:
    """Return the option's default in a body. None: no default, and the option may be omitted; MISSING: it may not."""
    if option.attribute.partition(".")[0] in JOINTS:
        return option.default
    return _attribute(spec, option.attribute)[1]


@cache
def _form(owner: type, attribute: str) -> Form:
    return form_of(_attribute(owner, attribute)[0])


@cache
def _attribute(owner: type, attribute: str) -> tuple[Any, Any]:
    """Return the type of a dotted attribute, and its default."""
    name, dot, rest = attribute.partition(".")
    if dot:
        return _attribute(_hints(owner)[name], rest)
    found = next(field for field in fields(owner) if field.name == name)
    made = found.default if found.default_factory is MISSING else found.default_factory()
    return _hints(owner)[name], made


@cache
def _hints(owner: type) -> Mapping[str, Any]:
    return get_type_hints(owner, include_extras=True)


def tree(table: Sequence[Option] = TABLE) -> Json:
    """Return the options as a tree, by the parts of their paths in a body."""
    found: Json = {}
    for option in table:
        put(found, option.path, option)
    return found


# ---- names -----------------------------------------------------------------------------------------------------------


def wire_name(attribute: str, table: Sequence[Option] = TABLE) -> str:
    """Return the name in a body of an attribute of the spec, or of a part of one."""
    return _renamed(attribute, {option.attribute: option.path for option in table})


def python_name(path: str, table: Sequence[Option] = TABLE) -> str:
    """Return the SDK's keyword for a path in a body."""
    return _renamed(path, {option.path: option.name for option in table})


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the name of the longest prefix that has one; a group of options has the common prefix of their names."""
    parts = name.split(".")
    for many in range(len(parts), 0, -1):
        known = names.get(".".join(parts[:many]))
        if known is not None:
            return ".".join((known, *parts[many:]))
    within = {other.rpartition(".")[0] for own, other in names.items() if own.startswith(f"{name}.")}
    return (within.pop() if len(within) == 1 else "") or name


def renamed(error: ValidationError, rename: Callable[[str], str]) -> ValidationError:
    """Return the same error with the field's name elsewhere."""
    if type(error) is not ValidationError:
        return error  # it names no field
    return ValidationError(rename(error.field), error.value, error.problem)


def keywords(table: Sequence[Option] = TABLE) -> frozenset[str]:
    """Return the SDK's keywords of these options."""
    return frozenset(option.name.partition(".")[0] for option in table if option.in_sdk)
