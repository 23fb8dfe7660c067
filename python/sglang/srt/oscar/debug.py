"""--oscar-debug-checks: compare every 16-bit row that is read with its 2-bit row."""

from __future__ import annotations

from oscar_kernel import LayerCache, LayerCodec, ReadPlan


def check_window_rows(plan: ReadPlan, cache: LayerCache, codec: LayerCodec, layer_id: int) -> None:
    """Every window row that is read must encode to the 2-bit row of its slot; else it is somebody else's.

    Raises:
        RuntimeError: some do not.
    """
    if plan.slots.shape[1] == 0:
        return
    mask = plan.window_mask
    slots = plan.slots.gather(1, plan.window_positions.clamp(0, plan.slots.shape[1] - 1))[mask]
    rows = plan.window_rows[mask]
    same_k, same_v = (
        (codec_side.encode(side.window[rows]) == side.buffer[slots]).flatten(1).all(1)
        for codec_side, side in ((codec.k, cache.k), (codec.v, cache.v))
    )
    stale = ~(same_k & same_v)
    if stale.any():
        raise RuntimeError(
            f"--oscar-debug-checks: layer {layer_id}: {int(stale.sum())} of {len(rows)} 16-bit rows belong to other tokens "
            f"than their slots, first slot {int(slots[stale][0])}"
        )
