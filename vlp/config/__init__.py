"""Typed configuration: YAML files with inheritance, dotted overrides and clear errors.

Every package owns the part it reads (`vlp/models/config.py`, `vlp/data/config.py`, ...); each part
is a subclass of `Config`. `load_config` reads a file, follows `inherit:`, applies `key.sub=value`
overrides and validates; every failure is a `ConfigError` that names the key, the file it stands in
and the nearest valid key.
"""

from vlp.config.files import (
    config_file,
    dump_yaml,
    load_config,
    merged,
    overridden,
    parse_yaml,
    read_values,
    save_config,
    validated,
)
from vlp.config.schema import (
    PLUGINS,
    AnyConfig,
    Choice,
    Config,
    ConfigError,
    LocalPath,
    Precision,
    load_plugins,
    plugin_of,
    require_plugins,
)

__all__ = [
    "PLUGINS",
    "AnyConfig",
    "Choice",
    "Config",
    "ConfigError",
    "LocalPath",
    "Precision",
    "config_file",
    "dump_yaml",
    "load_config",
    "load_plugins",
    "merged",
    "overridden",
    "parse_yaml",
    "plugin_of",
    "read_values",
    "require_plugins",
    "save_config",
    "validated",
]
