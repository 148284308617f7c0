"""What the package ``evals`` adds to the command line, wherever it is there.

Nothing here imports it by name: it judges speech and stands beside this package, in every clone and
where both were installed.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def from_evals(module: str, name: str) -> Any:
    """What a module of ``evals`` calls ``name``; None where there is no such package.

    It is looked for beside this package and, in a clone, beside ``src``: an installation need not
    know of it, and another package of that name is never taken for it.
    """
    for folder in Path(__file__).parents[2:4]:
        if (folder / "evals" / "commands.py").is_file():
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
            return getattr(import_module(f"evals.{module}"), name)
    return None
