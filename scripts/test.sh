#!/usr/bin/env bash
# Install and run every test, one worker a core. Arguments go to pytest: bash scripts/test.sh -k codec
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=install.sh
source "$here/install.sh" ".[test]"
ruff check .
ruff format --check --quiet .
python scripts/real_model.py smollm2 || echo "The tests with SmolLM2 are skipped."
workers="$(env -u OMP_NUM_THREADS nproc)"  # which counts no more than OMP_NUM_THREADS
# One thread a process: tests are small, and workers and their servers share the machine's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A file is run by one worker, since its tests share servers and models; test/conftest.py puts the longest files first.
exec python -m pytest -q --durations 15 --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
