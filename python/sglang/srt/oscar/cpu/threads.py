"""Cores of the ranks of a server on the CPU platform."""

from __future__ import annotations

import os
from typing import Any

BIND = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's variable for the cores of each rank, e.g. "0,1|2,3"."""


def bind_threads(server_args: Any) -> None:
    """Give every rank its own cores where SGLang would stop: with more ranks than NUMA nodes.

    The choice is written to SGLANG_CPU_OMP_THREADS_BIND, which workers inherit. What the user set there stays.

    Args:
        server_args: SGLang's `ServerArgs`, while it resolves, on our platform.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    if cfg.device != "cpu" or os.environ.get(BIND):
        return
    ranks = cfg.dp_size * cfg.tp_size * cfg.pp_size
    if ranks > numa_nodes():
        os.environ[BIND] = cores_by_rank(ranks)
        # Without sgl_kernel SGLang binds nothing; ranks that each start a thread a core would fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))


def bound_by_us() -> bool:
    """Whether the cores of the ranks are those that `bind_threads` would choose, and not the user's choice."""
    bound = os.environ.get(BIND, "")
    return bool(bound) and bound == cores_by_rank(bound.count("|") + 1)


def numa_nodes() -> int:
    """NUMA nodes with cores, as SGLang counts them."""
    from sglang.srt.utils.common import get_cpu_ids_by_node

    return max(1, len(get_cpu_ids_by_node()))


def cores_by_rank(ranks: int) -> str:
    """The cores that this process may use, in `ranks` even parts.

    Args:
        ranks: number of parts, at least 1.
    Returns:
        In SGLang's notation, "0,1|2,3". With fewer cores than ranks, ranks share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    share, rest = divmod(len(cores), ranks)
    parts, start = [], 0
    for rank in range(ranks):
        end = start + share + (rank < rest)
        parts.append(",".join(map(str, cores[start:end])))
        start = end
    return "|".join(parts)
