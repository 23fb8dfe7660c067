#!/usr/bin/env bash
# Make .venv in the checkout and install this package with stock SGLang. Sourced by quickstart.sh and test.sh.
# The first time it downloads SGLang's whole stack (about 11 GB on disk, about 5 minutes); later it is seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv
fi
export PATH="$PWD/.venv/bin:$PATH"
echo "Installing into .venv (the first time: about 11 GB, 5 minutes) ..."
python -m pip install --quiet --disable-pip-version-check --editable "${1:-.}"
