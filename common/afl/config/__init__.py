"""The configuration of a run: one YAML file, a typed schema, and errors that say what would be right.

What the schema holds is described by :mod:`afl.config.document`.
"""

from afl.config.address import (
    Address,
    check_plaintext,
    is_loopback,
    is_wildcard,
    parse_listen,
    parse_target,
)
from afl.config.compressors import check_compressor
from afl.config.dump import config_digest, dump_config
from afl.config.load import config_from_mapping, config_from_text, load_config
from afl.config.problems import InvalidConfigError, Problem
from afl.config.quantities import Duration, Size
from afl.config.schema import (
    Algorithm,
    Compressor,
    Config,
    Evaluation,
    Faults,
    Run,
    Server,
    Task,
    Worker,
)

__all__ = [
    "Address",
    "Algorithm",
    "Compressor",
    "Config",
    "Duration",
    "Evaluation",
    "Faults",
    "InvalidConfigError",
    "Problem",
    "Run",
    "Server",
    "Size",
    "Task",
    "Worker",
    "check_compressor",
    "check_plaintext",
    "config_digest",
    "config_from_mapping",
    "config_from_text",
    "dump_config",
    "is_loopback",
    "is_wildcard",
    "load_config",
    "parse_listen",
    "parse_target",
]
