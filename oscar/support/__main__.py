"""`python -m oscar.support > docs/server-options.md`: print the page of all server options."""

from oscar.support.server_options import markdown

print(markdown(), end="")
