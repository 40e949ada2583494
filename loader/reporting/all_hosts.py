"""Measurements of the loaders of all JAX processes, compared."""

from collections.abc import Mapping

from millstream.loader.reporting.metrics import PREFIX
from millstream.sharding import gathered_by_jax

COMPARED = ("wait_share", "batches_per_second", "errors", "worker_deaths")


def compared_hosts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the process whose trainer waits most, and sums over all processes. All must call it.

    Args:
        metrics: those of this process.

    Returns:
        `loader/slowest_host`: the index of the process with the largest `loader/wait_share`;
        `loader/slowest_host_wait_share` and `loader/slowest_host_batches_per_second`: its values;
        `loader/all_hosts_errors` and `loader/all_hosts_worker_deaths`: the sums.
    """
    gathered = gathered_by_jax([metrics[PREFIX + name] for name in COMPARED])
    wait_shares, rates, errors, deaths = zip(*gathered, strict=True)
    slowest = wait_shares.index(max(wait_shares))
    compared = {
        "slowest_host": slowest,
        "slowest_host_wait_share": wait_shares[slowest],
        "slowest_host_batches_per_second": rates[slowest],
        "all_hosts_errors": sum(errors),
        "all_hosts_worker_deaths": sum(deaths),
    }
    return {PREFIX + name: float(value) for name, value in compared.items()}
