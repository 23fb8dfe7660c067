"""`python -m oscar`: the same as the `oscar` command."""

import sys

from oscar.cli import main

sys.exit(main())
