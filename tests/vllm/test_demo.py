"""`prefixbus demo --engine vllm`, as a person runs it: about three minutes on two cores that do nothing else."""

import re
import subprocess
import sys

import pytest
from support.processes import spawned
from support.vllm import PYTHON

LAST_LINE = re.compile(
    r"demo: ok round_robin_ttft_p50_ms=(\d+\.\d) prefix_aware_ttft_p50_ms=(\d+\.\d) "
    r"cached_token_ratio=(\d\.\d{3}) wrong_hits=0"
)
MEDIANS = re.compile(r"first token at the median: (\d+) ms warm .*, (\d+) ms cold", re.DOTALL)
TIMEOUT_S = 1200


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_demo_on_real_engines_ends_well() -> None:
    command = [sys.executable, "-m", "prefixbus", "demo", "--engine", "vllm", "--vllm-python", str(PYTHON)]

    with spawned(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        said, errors = (text.decode() for text in process.communicate(timeout=TIMEOUT_S - 20))

    assert process.returncode == 0, said + errors
    assert LAST_LINE.fullmatch(said.splitlines()[-1]), said
    medians = MEDIANS.search(said)
    assert medians, said
    assert int(medians[1]) < int(medians[2])
    assert "an answer: " in said
