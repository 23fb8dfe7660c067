"""Prometheus metrics of the two stores, on SGLang's own /metrics (with --enable-metrics)."""

from __future__ import annotations

from sglang.srt.oscar.pool import OscarTokenToKVPool


class CacheMetrics:
    """Sizes once, sink counters as they change. One rank reports; every rank's windows see the same requests.

    Args:
        pool: the 2-bit pool, windows attached.
        figures: what `pool.describe` returns.
        model_name: label, as on SGLang's own metrics.
    """

    def __init__(self, pool: OscarTokenToKVPool, figures: dict, model_name: str):
        # Imported late: the client reads where its files are from the environment, which SGLang sets first.
        from prometheus_client import Counter, Gauge

        self._counters = pool.windows.counters
        self._reported = {"sink_rows_lost": 0, "sink_rows_reused": 0}
        labels = {"model_name": model_name, "mode": figures["mode"]}

        def gauge(name, text):
            metric = Gauge(f"sglang:oscar_{name}", text, list(labels), multiprocess_mode="mostrecent")
            metric.labels(**labels).set(figures[name])

        gauge("bits_per_element", "Bits of the pool per K or V element, metadata included.")
        gauge("bytes_per_token", "Bytes of one token in the 2-bit pool on one rank.")
        gauge("tokens", "Slots of the pool: a token takes one, a row of the windows eight.")
        gauge("pool_bytes", "Bytes of the pool on one rank: 2-bit rows, the 16-bit windows in some of its slots, and maps.")
        texts = {
            "sink_rows_lost": "Sink tokens of reused prefixes that had lost their 16-bit row and are read in 2 bits.",
            "sink_rows_reused": "Sink tokens of reused prefixes found in 16 bits.",
        }
        self._metrics = {
            name: Counter(f"sglang:oscar_{name}", text, list(labels)).labels(**labels) for name, text in texts.items()
        }

    def update(self) -> None:
        """Add what the counters gained since the last call."""
        for name, metric in self._metrics.items():
            value = getattr(self._counters, name)
            if value != self._reported[name]:
                metric.inc(value - self._reported[name])
                self._reported[name] = value
