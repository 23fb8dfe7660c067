"""Entry point of the group `sglang.srt.plugins`: the attention backend and the hooks.

SGLang logs and swallows what is raised here, so nothing is checked here: argument resolution checks before the port opens, and
the backend's constructor refuses a pool that is not ours.
"""

from __future__ import annotations

import functools


def register() -> None:
    """Register the backend and the hooks; called once in every SGLang process."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers import io_struct
    from sglang.srt.oscar import hooks
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    @register_attention_backend("oscar")
    def make_backend(model_runner):
        from sglang.srt.oscar.backend import OscarAttnBackend

        return OscarAttnBackend(model_runner)

    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    sizes = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    state = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    around, after = HookType.AROUND, HookType.AFTER
    for target, hook, kind in (
        (f"{configurator}._resolve_kv_pool_class", hooks.resolve_kv_pool_class, around),
        (f"{configurator}._build_token_to_kv_pool_allocator", hooks.build_token_to_kv_pool_allocator, after),
        (f"{configurator}._profile_available_bytes", hooks.profile_available_bytes, after),
        (f"{configurator}.resolve_max_num_reqs", hooks.resolve_max_num_reqs, after),
        (f"{sizes}._compute_cell_size", hooks.compute_cell_size, around),
        (f"{state}.get_internal_state", hooks.get_internal_state, after),
    ):
        HookRegistry.register(target, hook, kind)
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for name, output in (
        ("update_weights_from_disk", io_struct.UpdateWeightFromDiskReqOutput),
        ("update_weights_from_distributed", io_struct.UpdateWeightsFromDistributedReqOutput),
        ("update_weights_from_tensor", io_struct.UpdateWeightsFromTensorReqOutput),
        ("update_weights_from_ipc", io_struct.UpdateWeightsFromIPCReqOutput),
    ):
        HookRegistry.register(f"{updater}.{name}", functools.partial(hooks.refuse_weight_update, output=output), around)
