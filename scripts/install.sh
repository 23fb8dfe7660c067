#!/usr/bin/env bash
# Make .venv in the checkout and install this package with stock SGLang. Sourced by quickstart.sh and test.sh.
# The first time it downloads SGLang's whole stack (about 11 GB on disk); later it is seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv
fi
export PATH="$PWD/.venv/bin:$PATH"
echo "Installing into .venv (the first time: about 11 GB) ..."
# Python compiles a module when it first imports it. Compiling all 36,000 of them here would be two thirds of pip's CPU time.
python -m pip install --quiet --disable-pip-version-check --no-compile --editable "${1:-.}"
