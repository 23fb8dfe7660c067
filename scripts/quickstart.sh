#!/usr/bin/env bash
# From nothing to a model served in 16 and in 2 bits side by side: install, calibrate, ask both, measure both, count memory.
set -euo pipefail
# shellcheck source=install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh" "."
python scripts/quickstart.py "$@"

cat <<TEXT

Next:
  your own model   .venv/bin/python -m sglang.launch_server --model-path MODEL --kv-quant oscar
  batch inference  .venv/bin/python examples/batch.py --help
  tests            bash scripts/test.sh
  how it works     docs/README.md
TEXT
