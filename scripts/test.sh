#!/usr/bin/env bash
# Install and run every test. Arguments go to pytest: bash scripts/test.sh -k codec
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
source "$here/install.sh" ".[test]"
ruff check .
# One thread a process: tests are small, and several servers share the machine's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python -m pytest -q "$@"
