"""The functions that run inside SGLang. What they attach to, and why, is listed in `upstream.py`."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.oscar.pool import OscarTokenToKVPool, describe, pool_class
from sglang.srt.oscar.runtime import get_runtime
from sglang.srt.oscar.window_pages import OscarAllocator, WindowPages
from sglang.srt.runtime_context import get_memory, get_parallel


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


def build_token_to_kv_pool_allocator(result, self, *args, **kwargs):
    """AFTER KVCacheConfigurator._build_token_to_kv_pool_allocator: an allocator that serves the windows too."""
    pool, rows = kwargs["token_to_kv_pool"], kwargs["req_to_token_pool"]
    if not isinstance(pool, OscarTokenToKVPool) or self.is_draft_worker:
        return result
    if type(result) is not PagedTokenToKVPoolAllocator:
        raise RuntimeError(f"--kv-quant oscar: expected SGLang's paged allocator of slots, it made a {type(result).__name__}")
    allocator = OscarAllocator(
        result.size, result.page_size, result.dtype, result.device, result.get_kvcache(), result.need_sort
    )
    windows = pool.make_windows(rows.req_to_token.shape[0])
    allocator.serve(windows, rows.req_to_token, not get_memory().disable_radix_cache)
    pool.window_pages = allocator.window_pages
    _release_with_rows(rows, allocator.window_pages, windows.table.sink_tokens)
    return allocator


def _release_with_rows(rows, pages: WindowPages, sink_tokens: int) -> None:
    """Let the pages of a request go where SGLang takes back its row of req_to_token."""
    free, free_rows = rows.free, rows.free_rows

    def free_with_pages(req):
        if not isinstance(req, Req):  # a session that closes: its tokens are not in the prefix cache
            pages.release(req.kv.req_pool_idx)
        elif req.kv.holds_kv:
            num_tokens = 0 if req.skip_radix_cache_insert else req.kv.kv_committed_len
            first = (*req.origin_input_ids[:sink_tokens], *req.output_ids[: max(0, sink_tokens - len(req.origin_input_ids))])
            prefix = (req.extra_key, req.cache_salt, *first[:num_tokens])
            pages.release(req.kv.req_pool_idx, num_tokens, prefix)
        free(req)

    def free_rows_with_pages(indices):
        for row in indices:
            pages.release(row)
        free_rows(indices)

    rows.free, rows.free_rows = free_with_pages, free_rows_with_pages


# What windows need, told to SGLang's scheduler. None of these does anything without our allocator.


def request_slot_reserve(result, self, req, **kwargs):
    """AFTER PrefillAdder._request_slot_reserve_for_req: windows that an admitted request may come to need."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, OscarAllocator):
        return result
    return result + allocator.window_pages.missing(req.kv.req_pool_idx, _final_len(req))


def running_request_offset(result, self, req):
    """AFTER PrefillAdder._get_running_request_total_token_offset: windows that a running request may come to need, as likely as
    the tokens that it may come to generate."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, OscarAllocator):
        return result
    ratio = 1.0 if req.sampling_params.ignore_eos else self.new_token_ratio
    return result + allocator.window_pages.missing(req.kv.req_pool_idx, _final_len(req)) * ratio


def new_tokens_required_next_decode(result, self, selected_indices=None):
    """AFTER ScheduleBatch.new_tokens_required_next_decode: pages that windows need for the next step."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, OscarAllocator):
        return result
    reqs = self.reqs if selected_indices is None else [self.reqs[i] for i in selected_indices]
    pages = allocator.window_pages
    return result + sum(pages.missing(req.kv.req_pool_idx, req.kv.kv_committed_len + 1) for req in reqs)


def prepare_for_extend(result, self):
    """AFTER ScheduleBatch.prepare_for_extend: take the pages that the step's windows need."""
    _grow(self, self.prefix_lens)
    return result


def prepare_for_decode(result, self):
    """AFTER ScheduleBatch.prepare_for_decode: take the pages that the step's windows need."""
    _grow(self, None)
    return result


def _grow(batch, prefix_lens) -> None:
    allocator = batch.token_to_kv_pool_allocator
    if isinstance(allocator, OscarAllocator) and batch.reqs:
        rows = [req.kv.req_pool_idx for req in batch.reqs]
        allocator.window_pages.grow(rows, batch.seq_lens_cpu[: len(rows)].tolist(), batch.tree_cache, prefix_lens)


def protected_size(result, self):
    """AFTER UnifiedRadixCache.protected_size: pages of the windows are accounted for, which SGLang's leak check asks."""
    allocator = self.token_to_kv_pool_allocator
    if not isinstance(allocator, OscarAllocator):
        return result
    return result + allocator.window_pages.held_slots + allocator.window_pages.retained_slots


def _final_len(req) -> int:
    """Tokens that a request can come to have; any number beyond the windows is as good as another."""
    new = min(req.sampling_params.max_new_tokens or 0, CLIP_MAX_NEW_TOKENS)
    return max(len(req.origin_input_ids) + new, len(req.full_untruncated_fill_ids) + 1)


def get_internal_state(result, self, *args, **kwargs):
    """AFTER SchedulerInternalStateController.get_internal_state: figures of both stores in /server_info."""
    pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, OscarTokenToKVPool):
        result.internal_state["oscar"] = describe(pool)
    return result


def _kv_heads(kvc) -> int:
    return kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size)
