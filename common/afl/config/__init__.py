"""The configuration of a run: one YAML file, a typed schema, and errors that say what would be right."""

from afl.config.compressors import check_compressor
from afl.config.dump import config_digest, dump_config
from afl.config.load import config_from_mapping, config_from_text, load_config
from afl.config.problems import InvalidConfigError
from afl.config.quantities import Duration, Size
from afl.config.schema import Config

__all__ = [
    "Config",
    "Duration",
    "InvalidConfigError",
    "Size",
    "check_compressor",
    "config_digest",
    "config_from_mapping",
    "config_from_text",
    "dump_config",
    "load_config",
]
