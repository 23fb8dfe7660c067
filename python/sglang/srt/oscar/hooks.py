"""The functions that run inside SGLang. What they attach to, and why, is listed in `upstream.py`."""

from __future__ import annotations

import functools

from sglang.srt.oscar.pool import OscarTokenToKVPool, describe, pool_class
from sglang.srt.oscar.runtime import get_runtime
from sglang.srt.runtime_context import get_parallel, get_schedule

WINDOW_SHARE = 0.02
"""Part of the KV budget that the windows may take before fewer requests run at once: it costs 2 % of the tokens."""
MIN_REQUESTS = 64
MIN_REQUESTS_CPU = 16
MAX_WINDOW_SHARE = 0.10
"""At least MIN_REQUESTS run at once, unless their windows would take more than this part of the budget."""

_requests_with_windows: int | None = None
"""What `profile_available_bytes` reserved windows for, kept for `resolve_max_num_reqs`: SGLang's configurator has no room."""


def resolve_kv_pool_class(original, self, *, kind, default):
    """AROUND KVCacheConfigurator._resolve_kv_pool_class: our pool for plain multi-head attention."""
    runtime = get_runtime(self.server_args)
    if runtime is None or kind != "mha" or self.is_draft_worker:
        return original(self, kind=kind, default=default)
    return pool_class(runtime)


def compute_cell_size(original, self, kvc, num_layers):
    """AROUND DefaultPoolConfigurator._compute_cell_size: bytes of a token on this rank."""
    runtime = get_runtime(kvc.server_args)
    if runtime is None or kvc.is_draft_worker:
        return original(self, kvc, num_layers)
    return runtime.bytes_per_token(num_layers, _kv_heads(kvc))


def profile_available_bytes(result, self, *args, **kwargs):
    """AFTER KVCacheConfigurator._profile_available_bytes: take the windows out of the budget."""
    runtime = get_runtime(self.server_args)
    if runtime is None or self.is_draft_worker:
        return result
    per_request = _bytes_per_request(runtime, self)
    asked = get_schedule().max_running_requests
    if asked is not None:
        requests = max(1, asked // self.attn_dp_size)
    else:
        at_least = MIN_REQUESTS_CPU if self.device == "cpu" else MIN_REQUESTS
        requests = default_requests(result, per_request, at_least)
    reserve = (requests + 1) * per_request
    if reserve >= result:
        raise ValueError(
            f"--kv-quant oscar: the 16-bit windows of {requests} running requests need {reserve / 2**30:.2f} GiB, the KV "
            f"budget is {result / 2**30:.2f} GiB; lower --max-running-requests or --oscar-recent-tokens, or raise "
            "--mem-fraction-static"
        )
    global _requests_with_windows
    _requests_with_windows = requests
    return result - reserve


def default_requests(budget: int, per_request: int, at_least: int = MIN_REQUESTS) -> int:
    """Requests that run at once when the user names no number: as many as WINDOW_SHARE of the budget pays for, and
    `at_least` where MAX_WINDOW_SHARE pays for those. budget, per_request in bytes."""
    if per_request == 0:
        return at_least
    cheap, dear = (int(share * budget / per_request) for share in (WINDOW_SHARE, MAX_WINDOW_SHARE))
    return max(1, cheap, min(at_least, dear))


def resolve_max_num_reqs(result, self, *args, **kwargs):
    """AFTER KVCacheConfigurator.resolve_max_num_reqs: no more requests than have windows."""
    return result if _requests_with_windows is None else min(result, _requests_with_windows)


def build_token_to_kv_pool_allocator(result, self, *args, **kwargs):
    """AFTER KVCacheConfigurator._build_token_to_kv_pool_allocator: clear slots where they are handed out."""
    pool = kwargs["token_to_kv_pool"]
    if not isinstance(pool, OscarTokenToKVPool) or self.is_draft_worker:
        return result
    for name in ("alloc", "alloc_extend", "alloc_decode"):
        setattr(result, name, _clearing(getattr(result, name), pool.clear_slots))
    return result


def _clearing(allocate, clear_slots):
    """An allocation door that also makes the maps forget the slots it hands out."""

    @functools.wraps(allocate)
    def wrapper(*args, **kwargs):
        slots = allocate(*args, **kwargs)
        if slots is not None:
            clear_slots(slots)
        return slots

    return wrapper


def get_internal_state(result, self, *args, **kwargs):
    """AFTER SchedulerInternalStateController.get_internal_state: figures of both stores in /server_info."""
    pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, OscarTokenToKVPool):
        result.internal_state["oscar"] = describe(pool)
    return result


def _kv_heads(kvc) -> int:
    return kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size)


def _bytes_per_request(runtime, kvc) -> int:
    return runtime.bytes_per_request(kvc.layer_info.num_effective_layers, _kv_heads(kvc))
