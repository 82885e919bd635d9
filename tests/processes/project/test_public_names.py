from __future__ import annotations

import subprocess
import sys

import afl


def test_every_public_name_can_be_imported_and_no_other() -> None:
    for name in afl.__all__:
        assert getattr(afl, name) is not None
    assert not hasattr(afl, "Compresor")


def test_the_commands_for_people_start_without_torch() -> None:
    code = "import sys, afl_cli.main, afl_cli.status, afl.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
