"""Is my code slow, or is the network? The bench measures the link between two ranks while they train.

    python examples/22_distributed_with_bench.py

The probe starts when the world is up, beside the ranks and behind them in priority. Draw the curve with
`basilica train bench NAME --plot link.svg`.
"""

import basilica

GRADIENTS_GB = 0.5  # what one step all-reduces: 4 bytes for each of 125 million parameters


@basilica.distributed(
    world_size=basilica.WorldSize(min=2, target=2, max=2), gpu_count=0, bench=True, grace_seconds=1, delete_on_exit=True
)
def train() -> None:
    import time

    for _ in range(40):
        time.sleep(1)  # a step of yours


def main() -> None:
    with train() as training:
        status = training.wait_until_bench_complete()
        assert status is not None
        print(f"bench {status.phase}: {status.message}")
        link = training.bench
        if link is not None and link.busbw_gbps_p50 is not None:
            show(link, link.busbw_gbps_p50)
        training.wait_until_complete()
        print(f"the training has {training.phase}")


def show(link: basilica.BenchResult, gb_per_second: float) -> None:
    for point in link.sweep:
        print(f"{point.size_bytes:>10} bytes {point.busbw_gbps:8.3f} GB/s {point.latency_us:10.1f} us")
    print(f"{link.method}: {gb_per_second:.2f} GB/s between {link.probe_node_a} and {link.probe_node_b}")
    print(f"a step that takes longer than {GRADIENTS_GB / gb_per_second:.2f} s is not waiting for the network")


if __name__ == "__main__":
    main()
