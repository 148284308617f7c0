"""``python -m mosstalk.cli``: the same as the ``mosstalk`` command."""

from mosstalk.cli import main

main()
