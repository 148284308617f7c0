"""Many servers behind one address, by Ray Serve: ``mosstalk fleet``, or ``app`` for ``serve run``.

Nothing here imports Ray before a fleet is started.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosstalk.fleet.config import FleetConfig, read_config

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: dict[str, Any]) -> "Application":
    """The fleet as an application of Ray Serve: ``serve run mosstalk.fleet:app config=FILE``.

    Raises:
        ConfigError: ``config`` names no file of a fleet, or there are other arguments.
        OptionError: this process lacks settings that Ray Serve must be started with.
    """
    from mosstalk.errors import ConfigError
    from mosstalk.fleet.replica import application

    unknown = sorted(set(arguments) - {"config"})
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: mosstalk.fleet:app takes config=FILE alone")
    path = arguments.get("config")
    return application(read_config(Path(path)) if path else FleetConfig())
