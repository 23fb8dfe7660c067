"""What scripts/gpu_check.sh runs: correctness of every Triton kernel at real sizes, then speed of store and decode."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import triton
from correct import checks
from speed import bench_decode, bench_store, copy_bandwidth, tune
from synthetic import Sizes

from oscar_kernel.triton.tuning import architecture

TIME_LIMIT = 240
"""Seconds after which no further timing of decode begins on a card."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="miniature sizes in Triton's interpreter, no card needed")
    parser.add_argument("--tune", action="store_true", help="also try the launch shapes of the table (several minutes)")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the figures go")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no card here; --smoke runs the same steps in Triton's interpreter")
        return 2
    device = "cpu" if args.smoke else "cuda"
    sizes = Sizes.miniature() if args.smoke else Sizes()
    torch.manual_seed(0)
    began = time.perf_counter()
    card = "Triton's interpreter" if args.smoke else torch.cuda.get_device_name()
    arch = architecture(torch.device(device)).key
    print(f"{card} ({arch}), PyTorch {torch.__version__}, Triton {triton.__version__}")
    result = {"card": card, "arch": arch, "torch": torch.__version__, "triton": triton.__version__}
    result["checks"] = found = run_checks(sizes, device)

    bandwidth = copy_bandwidth(sizes.copy_bytes, device)
    result["copy_gb_per_s"] = bandwidth / 1e9
    print(
        f"copy: {bandwidth / 1e9:.0f} GB/s. One layer, {sizes.heads} KV heads of {sizes.dim}, {sizes.kv_group_num} query heads "
        "each:"
    )
    result["store"] = bench_store(sizes, device)
    until = float("inf") if args.smoke else began + TIME_LIMIT
    result["decode"] = bench_decode(sizes, device, bandwidth, until)
    if args.tune:
        result["tune"] = tune(sizes, device, bandwidth)
    result["seconds"] = time.perf_counter() - began
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = sum(fault != "ok" for fault in found.values())
    verdict = f"FAILED: {wrong} of {len(found)} checks" if wrong else f"ok: {len(found)} checks"
    print(f"{verdict}, {result['seconds']:.0f} s, figures in {args.json}")
    return 1 if wrong else 0


def run_checks(sizes: Sizes, device: str) -> dict[str, str]:
    """Run and print all checks. name -> what is wrong, or "ok"."""
    found = {}
    for name, check in checks(sizes, device):
        start = time.perf_counter()
        try:
            fault = check()
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:300]}"
        found[name] = fault or "ok"
        print(f"  {name:40} {found[name]}  ({time.perf_counter() - start:.1f} s)", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
