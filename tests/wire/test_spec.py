"""An option is written down once: every place that has it is made from the table, and from the core's types."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from basilica.client.effects import Answer
from basilica.client.options import parse_options
from basilica.client.problems import error_of
from basilica.client.request import Program, to_wire
from basilica.core.errors import ValidationError, WorldSizeOutOfBounds
from basilica.core.spec import DURATION, DeploymentSpec, Exec, ProviderFilter, Range, Shell, Wanted
from basilica.core.world import WorldSize
from basilica.kube.manifests.crd import definition
from basilica.kube.manifests.userdeployment import OPTIONS, body_of, options_of_resource, spec_of
from basilica.server.problems import answer
from basilica.wire.requests import CreateDeployment, create_request, parse, to_spec
from basilica.wire.spec import TABLE, Option, from_body, python_name, to_body, wire_name
from basilica_testkube import KubeServer
from basilica_testkube.errors import ApiError
from tests.support.specs import WHOLE

Json = dict[str, Any]
NOT_THE_USERS = {"wanted", "generation", "gang"}  # they follow from what is asked of a run during its life
PLAIN = DeploymentSpec(name="plain", program=Shell("x"), world=WorldSize(1, 1, 1))
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def leaves(body: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in body.items():
        if isinstance(value, Mapping) and not name.lower().endswith("env") and name != "secrets":
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def places(schema: Json, prefix: str = "") -> Iterator[str]:
    """The paths of all values that the schema of the resource knows."""
    for name, below in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from places(below, f"{prefix}{name}.")


# ---- the table is whole ----------------------------------------------------------------------------------------------


def test_every_field_of_the_spec_is_in_the_table_or_not_the_users() -> None:
    known = {option.attribute.partition(".")[0] for option in TABLE}
    assert known | NOT_THE_USERS == {own.name for own in fields(DeploymentSpec)}
    assert not known & NOT_THE_USERS


def test_what_is_tried_here_is_nowhere_as_it_is_by_default() -> None:
    for own in fields(DeploymentSpec):
        if own.name != "generation":
            assert getattr(WHOLE, own.name) != getattr(PLAIN, own.name), f"{own.name} is not tried here"


@pytest.mark.parametrize("program", [WHOLE.program, Shell("echo $1", ("a b", ""))])
def test_every_option_survives_a_body(program: Exec | Shell) -> None:
    spec = replace(WHOLE, program=program, wanted=Wanted.RUN, gang=0)
    body = json.loads(json.dumps(to_body(spec)))
    assert from_body(body) == spec
    assert from_body(to_body(PLAIN)) == PLAIN


def test_every_row_has_a_place_in_a_body() -> None:
    told = {*leaves(to_body(WHOLE)), *leaves(to_body(replace(WHOLE, program=Shell("x", ("y",)))))}
    assert told == {option.path for option in TABLE}


def test_every_row_is_in_the_definition_of_the_resource() -> None:
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert {option.path for option in OPTIONS} <= set(places(schema))


def test_every_row_is_in_the_document_of_the_api_and_explained_in_the_reference() -> None:
    page = (REFERENCE / "rest.md").read_text()
    document = CreateDeployment.model_json_schema()
    for option in TABLE:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{option.path}` |"))
        assert row.endswith(f"| {option.about} |")
        told = document
        for part in option.path.split("."):
            reference = re.search(r"#/[$]defs/(\w+)", json.dumps(told)) if "properties" not in told else None
            told = (document["$defs"][reference[1]] if reference else told)["properties"][part]
        assert told["description"] == option.about


def test_every_keyword_of_the_sdk_is_in_the_reference() -> None:
    page = (REFERENCE / "sdk.md").read_text()
    for option in TABLE:
        if option.in_sdk:
            assert f"\n- `{option.name.partition('.')[0]}`: " in page


# ---- one more option -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Larger(DeploymentSpec):
    """A later version's spec: one more attribute of each kind."""

    niceness: Annotated[int, Range(0, 19)] = 0
    pause_seconds: Annotated[float, DURATION] | None = None
    mood: Literal["calm", "loud"] = "calm"
    verbose: bool = False
    banner: str = ""
    hosts: tuple[str, ...] = ()
    labels_env: Mapping[str, str] = field(default_factory=dict)


MORE = (
    Option("niceness", "distributed.niceness", "How much it gives way."),
    Option("pause_seconds", "distributed.pauseSeconds", "How long it rests; 0: not at all."),
    Option("mood", "distributed.character.mood", "How it speaks.", keyword="temper"),
    Option("verbose", "verbose", "Whether it says more."),
    Option("banner", "banner", "What it says first."),
    Option("hosts", "distributed.hosts", "Where it may go."),
    Option("labels_env", "labelsEnv", "What it is called."),
)
LARGER = (*TABLE, *MORE)
VALUES: Json = {
    "niceness": 7,
    "pause_seconds": 1.5,
    "temper": "loud",
    "verbose": True,
    "banner": "hello",
    "hosts": ["a", "b"],
    "labels_env": {"A": "1"},
}


def asked(table: tuple[Option, ...] = LARGER, spec: type[DeploymentSpec] = Larger, **options: Any) -> Json:
    deploy = parse_options("train", {"world_size": WorldSize(1, 2, 3), "command": "x", **options}, table)
    return to_wire("train", deploy, Program(command="x", resize="join", env={}), table, spec)


def test_an_option_more_is_a_row_and_an_attribute() -> None:
    """From a keyword of the SDK through REST and the API server of a cluster into the spec, with its definition."""
    body = asked(**VALUES)
    spec = to_spec(parse(create_request(LARGER, Larger), json.dumps(body).encode()), LARGER, Larger)
    told = {option.attribute: getattr(spec, option.attribute) for option in MORE}
    assert told == {
        "niceness": 7,
        "pause_seconds": 1.5,
        "mood": "loud",
        "verbose": True,
        "banner": "hello",
        "hosts": ("a", "b"),
        "labels_env": {"A": "1"},
    }
    mine = options_of_resource(LARGER)
    with KubeServer(processes=False) as kube:
        kube.create(definition(mine, Larger))
        resource = {"apiVersion": "basilica.dev/v1alpha1", "kind": "UserDeployment", "metadata": {"name": "train"}}
        kube.create(resource | {"spec": body_of(spec, options=mine)})
        found = kube.get("userdeployments", "train")
    assert found is not None
    assert found["spec"] == body_of(spec, options=mine), "the definition knows every field"
    assert spec_of(found, {}, mine, Larger) == spec


def test_without_a_row_an_attribute_has_no_place() -> None:
    with pytest.raises(TypeError, match="niceness"):
        asked(TABLE, niceness=7)
    assert "niceness" not in to_body(Larger(name="x", program=Shell("x"), world=WorldSize(1, 1, 1)))["distributed"]


@pytest.mark.parametrize(
    ("keyword", "value", "path"),
    [
        ("niceness", 20, "distributed.niceness"),
        ("niceness", "7", "distributed.niceness"),
        ("pause_seconds", -1, "distributed.pauseSeconds"),
        ("temper", "sad", "distributed.character.mood"),
        ("verbose", "yes", "verbose"),
        ("banner", 5, "banner"),
        ("hosts", "a", "distributed.hosts"),
        ("labels_env", {"A": 1}, "labelsEnv.A"),
    ],
)
def test_its_limits_are_held_under_the_name_that_the_reader_knows(keyword: str, value: Any, path: str) -> None:
    with pytest.raises(ValidationError) as in_sdk:
        asked(**{keyword: value})
    assert in_sdk.value.field.partition(".")[0] == keyword
    body = asked()
    *groups, last = path.removesuffix(".A").split(".")
    place = body
    for group in groups:
        place = place.setdefault(group, {})
    place[last] = value
    with pytest.raises(ValidationError) as in_rest:
        to_spec(parse(create_request(LARGER, Larger), json.dumps(body).encode()), LARGER, Larger)
    assert in_rest.value.field == path
    with pytest.raises(ValidationError) as in_resource:
        spec_of(resource_of(body), {}, options_of_resource(LARGER), Larger)
    assert in_resource.value.field == path


# ---- names in errors -------------------------------------------------------------------------------------------------


def resource_of(body: Json) -> Json:
    spec = {name: value for name, value in body.items() if name != "instanceName"}
    return {"metadata": {"name": "train", "generation": 1}, "spec": spec}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_restarts": -1}, "max_restarts: must be within 0..1000000 (got -1)"),
        ({"max_restarts": "2"}, "max_restarts: must be a whole number (got '2')"),
        ({"gpu_count": 5000}, "gpu_count: must be within 0..1024 (got 5000)"),
        ({"memory": "lots"}, "memory: must be bytes such as '32Gi', '512Mi' or '2G' (got 'lots')"),
        ({"on_stall": "panic"}, "on_stall: must be 'show' or 'restart' (got 'panic')"),
        ({"bench": "yes"}, "bench: must be 'off' or 'on-start' (got 'yes')"),
        ({"bench": True, "bench_placement": "lax"}, "bench_placement: must be 'preferred' or 'strict' (got 'lax')"),
        ({"nccl_env": {"A": "x\0"}}, "nccl_env.A: holds a NUL character (got '2 characters')"),
        ({"provider_filter": "cyan"}, "provider_filter: has no `include` (got 'str')"),
        ({"gpu_models": "H100"}, "gpu_models: must be a list of texts (got 'H100')"),
    ],
)
def test_a_user_of_the_sdk_reads_keywords(options: Json, text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        asked(**options)
    assert str(refused.value) == text


@pytest.mark.parametrize("path", [option.path for option in TABLE])
def test_a_refusal_of_the_server_is_told_in_the_words_of_the_sdk(path: str) -> None:
    refusal = answer(ValidationError(path, -1, "must be within 0..5"))
    error = error_of(Answer(refusal.status_code, {}, bytes(refusal.body)))
    assert isinstance(error, ValidationError)
    assert str(error) == f"{python_name(path)}: must be within 0..5 (got -1)"
    assert error.field.partition(".")[0] not in ("distributed", "resources", "instanceName")


def test_another_servers_refusal_is_passed_on_as_it_is() -> None:
    error = error_of(Answer(400, {}, b'{"error": {"code": "X", "message": "no good"}}'))
    assert str(error) == "request: no good (got None)"


@pytest.mark.parametrize(
    ("attribute", "path", "keyword"),
    [
        ("max_restarts", "distributed.maxRestarts", "max_restarts"),
        ("resources.gpus.min_memory_gb", "resources.gpus.minGpuMemoryGb", "min_gpu_memory_gb"),
        ("nccl_env.A.b", "distributed.nccl.env.A.b", "nccl_env.A.b"),
        ("world", "distributed.worldSize", "world_size"),
        ("program.script", "distributed.command", "command"),
        ("archive", "workdirArchive", "workdir"),
        ("unknown.thing", "unknown.thing", "unknown.thing"),
    ],
)
def test_names(attribute: str, path: str, keyword: str) -> None:
    assert wire_name(attribute) == path
    assert python_name(path) == keyword


def test_a_size_that_cannot_be_is_told_as_such_everywhere() -> None:
    body = to_body(PLAIN)
    body["distributed"]["worldSize"]["target"] = 9
    with pytest.raises(WorldSizeOutOfBounds):
        from_body(body)


# ---- REST and the custom resource agree ------------------------------------------------------------------------------


def read(body: Json) -> tuple[DeploymentSpec, DeploymentSpec]:
    named = {"instanceName": "train", **body}
    return to_spec(parse(CreateDeployment, json.dumps(named).encode())), spec_of(resource_of(named))


def refusals(body: Json) -> tuple[str, str]:
    named = {"instanceName": "train", **body}
    with pytest.raises(ValidationError) as in_rest:
        to_spec(parse(CreateDeployment, json.dumps(named).encode()))
    with pytest.raises(ValidationError) as in_resource:
        spec_of(resource_of(named))
    return str(in_rest.value), str(in_resource.value)


SIZE = {"min": 1, "target": 1, "max": 1}
NOTHING = "distributed.command: there is nothing to run: give a command (an image's own entrypoint is not known here)"


@pytest.mark.parametrize("script", ["auto", "", None])
def test_a_script_that_is_none_means_the_command_beside_it(script: str | None) -> None:
    gang = {"worldSize": SIZE, "command": script}
    for spec in read({"command": ["python"], "args": ["-V"], "distributed": gang}):
        assert spec.program == Exec(("python", "-V"))
    in_rest, in_resource = refusals({"distributed": gang})
    assert in_rest == in_resource == f"{NOTHING} (got {script!r})"


def test_an_unknown_placement_matters_only_to_a_bench_that_is_on() -> None:
    bench = {"mode": "off", "placement": "lax"}
    gang = {"worldSize": SIZE, "command": "x", "bench": bench}
    for spec in read({"distributed": gang}):
        assert spec.bench is None
    bench["mode"] = "on-start"
    in_rest, in_resource = refusals({"distributed": gang})
    assert in_rest == in_resource == "distributed.bench.placement: must be 'preferred' or 'strict' (got 'lax')"


@pytest.mark.parametrize(
    ("gang", "told"),
    [
        ({"command": "auto"}, NOTHING),
        ({"command": "x", "bench": {"mode": "on-start", "placement": "lax"}}, "must be 'preferred' or 'strict'"),
        ({"command": "x", "bench": {"mode": "off", "placement": "lax"}}, None),
        ({"command": "x", "bench": {"mode": "on-start", "placement": "strict"}}, None),
        ({"command": "x", "bench": {"mode": "on-start"}}, None),
    ],
)
def test_the_api_server_refuses_what_rest_refuses(gang: Json, told: str | None) -> None:
    metadata = {"name": "train", "namespace": "default"}
    resource = {"apiVersion": "basilica.dev/v1alpha1", "kind": "UserDeployment", "metadata": metadata}
    resource["spec"] = {"distributed": {"worldSize": SIZE, **gang}}
    with KubeServer(processes=False) as kube:
        kube.create(definition())
        if told is None:
            kube.create(resource)
        else:
            with pytest.raises(ApiError, match=re.escape(told)):
                kube.create(resource)


@pytest.mark.parametrize("damage", [5, "text", [], {"worldSize": 3}, {"worldSize": {"min": 1}}])
def test_a_body_of_another_shape_is_refused_with_the_place(damage: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        from_body({"instanceName": "x", "command": ["x"], "distributed": damage})
    assert refused.value.field.startswith("distributed")


def test_a_filter_of_providers_and_any_collection_of_texts_are_taken() -> None:
    body = asked(provider_filter=ProviderFilter(("a",), ("b",)), gpu_models=("H100",), ttl_seconds=0, bench=True)
    gang = body["distributed"]
    assert gang["providerFilter"] == {"include": ["a"], "exclude": ["b"]}
    assert gang["bench"] == {"mode": "on-start", "placement": "preferred"}
    assert (body["resources"]["gpus"], "ttlSeconds" in body) == ({"count": 1, "model": ["H100"]}, False)
    assert (body["replicas"], gang["enabled"]) == (2, True)
