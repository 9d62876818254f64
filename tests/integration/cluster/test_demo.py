"""`prefixbus demo`, as a person runs it: about 25 s on a machine that does nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import spawned

LAST_LINE = re.compile(
    r"demo: ok round_robin_ttft_p50_ms=(\d+\.\d) prefix_aware_ttft_p50_ms=(\d+\.\d) "
    r"cached_token_ratio=(\d\.\d{3}) wrong_hits=0"
)
TIMEOUT_S = 240


@pytest.mark.timeout(TIMEOUT_S)
def test_the_demo_ends_well_and_its_last_line_says_so(tmp_path: Path) -> None:
    # What it needs of a temporary directory is here, so that what it leaves behind is seen.
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "prefixbus", "demo"]

    with spawned(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        said, errors = (text.decode() for text in process.communicate(timeout=TIMEOUT_S - 20))

    assert process.returncode == 0, said + errors
    match = LAST_LINE.fullmatch(said.splitlines()[-1])
    assert match, said
    round_robin, prefix_aware, ratio = (float(figure) for figure in match.groups())
    assert prefix_aware < round_robin
    assert ratio > 0.3
    for word in ("document", "template", "system", "session", "unique", "prefer-warm-worker", "net prefill saved"):
        assert word in said
    assert errors.rstrip().splitlines()[-1].startswith("curl -N http://127.0.0.1:8000/v1/chat/completions ")
    assert list(tmp_path.iterdir()) == []
