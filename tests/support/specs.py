"""A spec in which nothing is as it is by default."""

from basilica.core.spec import BenchOnStart, DeploymentSpec, Exec, Gpus, ProviderFilter, Resources, Wanted
from basilica.core.world import WorldSize

WHOLE = DeploymentSpec(
    name="train",
    program=Exec(("python", "-c", "print('ü')", "")),
    world=WorldSize(1, 2, 3),
    wanted=Wanted.CANCEL,
    generation=1,
    gang=2,
    image="trainer:1",
    port=1234,
    resources=Resources(cpu=0.333, memory_bytes=(1 << 40) + 1, gpus=Gpus(2, ("H100",), 80)),
    env={"A": "1", "B": ""},
    secrets={"TOKEN": "s3cret"},
    nccl_env={"NCCL_DEBUG": "INFO"},
    workdir="inside",
    archive="ab" * 32,
    rendezvous_backend="c10d",
    rendezvous_port=29400,
    provider_filter=ProviderFilter(("cyan",), ("opal",)),
    topology_spread="region-aware",
    bench=BenchOnStart("strict"),
    resize="restart",
    on_stall="restart",
    max_restarts=3,
    grace_seconds=0.5,
    notice_seconds=12.5,
    notice_signal="SIGUSR1",
    ttl_seconds=99.5,
    deadline_seconds=0.1,
    start_deadline_seconds=7.0,
    checkpoint_uri="s3://bucket/prefix",
    resume_from="train-0a1b2c3d@400",
)
