"""`python -m oscar`: the same as the `oscar` command."""

import sys

from oscar.commands.main import main

sys.exit(main())
