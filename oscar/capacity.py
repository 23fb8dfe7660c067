"""What a model's KV cache will take, in 2 and in 16 bits: `oscar plan`. It reads config.json and counts as the server does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from oscar import config
from oscar.errors import OscarError
from oscar.options import GROUP_SIZE, MODEL, Options, option, recent_tokens, sink_tokens, skip_layers

_COUNTED = "counted with each request"


@dataclass(frozen=True)
class PlanOptions(Options):
    """What is planned for."""

    model: str | Path = field(metadata=MODEL)
    memory_gib: float | None = field(
        default=None, metadata=option("memory for the KV cache in GiB: prints what fits in it", metavar="G")
    )
    context: int | Sequence[int] | None = field(
        default=None,
        metadata=option(
            "tokens of one request; repeatable",
            metavar="N",
            many="repeat",
            default_is=f"those of {', '.join(map(str, config.DEFAULT_PLAN_CONTEXTS))} that the model reaches, and its longest",
        ),
    )
    group_size: int | None = field(default=None, metadata=GROUP_SIZE)
    skip_layers: Sequence[int] = field(default=(), metadata=skip_layers("counted so"))
    sink_tokens: int = field(default=config.DEFAULT_SINK_TOKENS, metadata=sink_tokens(_COUNTED))
    recent_tokens: int = field(default=config.DEFAULT_RECENT_TOKENS, metadata=recent_tokens(_COUNTED))

    @property
    def contexts(self) -> tuple[int, ...]:
        """`context`, always several; none where the model decides."""
        return (self.context,) if isinstance(self.context, int) else tuple(self.context or ())


@dataclass(frozen=True)
class RequestPlan:
    """Requests of one length.

    Attributes:
        tokens: of a request.
        bytes: of its cache in 2 bits, windows and whole pages included. bytes_16_bit: in 16 bits.
        ratio: of the two, how many times fewer.
        requests, requests_16_bit: how many such requests the memory holds; None where no memory was given.
    """

    tokens: int
    bytes: int
    bytes_16_bit: int
    ratio: float
    requests: int | None = None
    requests_16_bit: int | None = None


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of a model in 2 and in 16 bits. As text it is the table of `oscar plan`.

    Attributes:
        bytes_per_token, bytes_per_token_16_bit: of one token in the pool, over all layers.
        ratio: of the two, how many times fewer.
        bits_per_element: of one number of K or V in the pool, codes and metadata, mean over layers.
        window_bytes: that the windows of a long request take. window_rows: their rows.
        contexts: one for each length of a request.
        memory_gib: memory for the cache in GiB, or None.
        skip_layers: layers that stay in 16 bits.
    """

    bytes_per_token: int
    bytes_per_token_16_bit: int
    ratio: float
    bits_per_element: float
    window_bytes: int
    window_rows: int
    contexts: tuple[RequestPlan, ...]
    memory_gib: float | None = None
    skip_layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        native = f", layers {', '.join(map(str, self.skip_layers))} in 16" if self.skip_layers else ""
        lines = [
            f"bytes per token: {self.bytes_per_token:,} in 2 bits, {self.bytes_per_token_16_bit:,} in 16 bits "
            f"({self.ratio:.2f} times fewer); {self.bits_per_element:.3f} bits per element{native}",
            f"windows: up to {self.window_rows} rows in 16 bits a running request, {self.window_bytes / 2**20:.2f} MiB",
        ]
        for row in self.contexts:
            line = (
                f"context {row.tokens:,}: {row.bytes / 2**20:,.1f} MiB a request instead of "
                f"{row.bytes_16_bit / 2**20:,.1f} MiB ({row.ratio:.2f} times fewer)"
            )
            if self.memory_gib is not None:
                line += f"; {self.memory_gib:g} GiB hold {row.requests:,} requests instead of {row.requests_16_bit:,}"
            lines.append(line)
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """What `oscar plan --json` prints: the measured numbers, without what was asked."""
        asked = ("memory_gib", "skip_layers", "window_rows")
        found = {name: value for name, value in asdict(self).items() if name not in asked}
        return found | {"contexts": [{k: v for k, v in row.items() if v is not None} for row in found["contexts"]]}


def plan(options: PlanOptions) -> CachePlan:
    """Count the bytes of a model's KV cache from its config.json and the row format alone.

    Raises:
        OscarError: no such model, or a value that cannot be.
    """
    from oscar.calibration.check import check, formats
    from oscar.calibration.options import CalibrationOptions
    from oscar.format import sizing

    windows = sinks, recent = options.sink_tokens, options.recent_tokens
    skipped = tuple(sorted(set(options.skip_layers)))
    calibration = CalibrationOptions(
        options.model,
        method="identity",
        group_size=options.group_size,
        sink_tokens=sinks,
        recent_tokens=recent,
        skip_layers=skipped,
    )
    identity, model_config = check(calibration)
    if options.memory_gib is not None and options.memory_gib <= 0:
        raise OscarError(f"memory must be positive, got {options.memory_gib} GiB")
    if bad := [n for n in options.contexts if n <= 0]:
        raise OscarError(f"context must be positive, got {bad[0]}")
    k, v = formats(calibration, identity)
    geometry, dims = (identity.num_layers, identity.num_kv_heads), (identity.head_dim, identity.v_head_dim)
    coded = sizing.bytes_per_token(*geometry, k, v, len(skipped))
    full = sizing.bytes_per_token_16_bit(*geometry, *dims)

    def request(tokens: int) -> RequestPlan:
        num_bytes, full_bytes = sizing.request_slots(tokens, *windows) * coded, tokens * full
        ratio = full_bytes / num_bytes
        if options.memory_gib is None:
            return RequestPlan(tokens, num_bytes, full_bytes, ratio)
        budget = int(options.memory_gib * 2**30)
        return RequestPlan(tokens, num_bytes, full_bytes, ratio, budget // num_bytes, budget // full_bytes)

    return CachePlan(
        bytes_per_token=coded,
        bytes_per_token_16_bit=full,
        ratio=full / coded,
        bits_per_element=sizing.bits_per_element(k, v, len(skipped) / identity.num_layers),
        window_bytes=sizing.window_slots(sinks + recent, *windows) * coded,
        window_rows=sinks + recent,
        contexts=tuple(map(request, options.contexts or _reached(model_config))),
        memory_gib=options.memory_gib,
        skip_layers=skipped,
    )


def _reached(model_config) -> tuple[int, ...]:
    """The default request lengths up to the model's context length, and that length where it is less than the longest."""
    longest = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    asked = config.DEFAULT_PLAN_CONTEXTS
    if longest is None or longest >= asked[-1]:
        return asked
    return tuple(sorted({n for n in asked if n < longest} | {longest}))
