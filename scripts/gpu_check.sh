#!/usr/bin/env bash
# First run of the 2-bit kernels on a card: is every kernel right, and how fast is decode?
#
#   scripts/gpu_check.sh                 correctness, then decode at batch 1, 8, 32 and 8K, 32K, 100K tokens; under 5 minutes
#   scripts/gpu_check.sh --tune          also tries the launch shapes of oscar_kernel.triton.tuning and prints entries for its table
#   scripts/gpu_check.sh --smoke         the same steps in miniature in Triton's interpreter, on a machine without a card
#
# Needs PyTorch and Triton, no network and no installation. Writes gpu_check.json in the current folder (--json PATH).
# Exit status 1 if any kernel is wrong.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for argument in "$@"; do
    [ "$argument" = "--smoke" ] && export TRITON_INTERPRET=1
done
export PYTHONPATH="$root:$root/sgl-kernel/python${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/scripts/gpu/check.py" "$@"
