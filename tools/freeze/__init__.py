"""Freezes what mosstalk does: records it at two commits, on one machine, and compares.

``python -m tools.freeze compare`` is the whole of it; docs/architecture.md says how it is used.
Only what lasts is called: the command, files, the wire, and names of ``mosstalk`` itself. Nothing
here imports a module of the package.
"""
