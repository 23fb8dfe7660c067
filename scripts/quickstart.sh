#!/usr/bin/env bash
# From nothing to a server with a 2-bit KV cache: install, calibrate the embedded model, serve it, ask it, show what was saved.
set -euo pipefail
# shellcheck source=install.sh
source "$(dirname "${BASH_SOURCE[0]}")/install.sh" "."
model="$(python -m oscar model-path)"
out="build/quickstart"
mkdir -p "$out"

echo
echo "1. Calibrate the embedded model"
python -m oscar calibrate --model "$model" --output "$out/oscar.kvq"

echo
echo "2. Serve it in 2 bits and ask about a fact hidden in a long prompt"
python examples/serve_and_ask.py --model "$model" --artifact "$out/oscar.kvq" --log "$out/server.log"

cat <<TEXT

Next:
  your own model   .venv/bin/python -m sglang.launch_server --model-path MODEL --kv-quant oscar
  batch inference  .venv/bin/python examples/batch.py --help
  tests            bash scripts/test.sh
  how it works     docs/README.md
TEXT
