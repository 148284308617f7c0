"""What judges speech: beside the package, which imports nothing of it.

Its commands are part of ``mosstalk bench`` wherever this package is there, as in every clone.
"""
