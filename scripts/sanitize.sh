#!/usr/bin/env bash
# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer. Arguments go to pytest.
#
# Builds an instrumented library in a folder of its own; PyTorch's own code is not instrumented, so leaks are not looked for.
# AMX instructions are opaque to the instruments: level amx_emulated has their reads and writes in C++, from the same source.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$root"
python - "$work" <<'PY'
import sys
from pathlib import Path

sys.path.insert(0, "sgl-kernel")
import build_cpu

flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-O1", "-g")
print(build_cpu.build(Path(sys.argv[1]), work=Path(sys.argv[1]) / "objects", extra_flags=flags))
PY
runtime="$("${CXX:-g++}" -print-file-name=libasan.so):$("${CXX:-g++}" -print-file-name=libubsan.so)"
export OSCAR_CPU_LIBRARY="$work/liboscar_cpu.so"
export ASAN_OPTIONS="detect_leaks=0" UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
LD_PRELOAD="$runtime" python -m pytest -q -p no:cacheprovider test/kernel/test_attention.py -k "not reference" "$@"
