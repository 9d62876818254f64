"""Hypothesis profiles for the whole suite: `dev` small, `ci` derandomised, `deep` by hand (HYPOTHESIS_PROFILE=deep).

And the rule that the loop never blocks: no module of prefixbus may sleep, read a file or wait for a socket or a lock on
a running event loop; in every test that runs one, the call raises where it is made."""

import os
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

# Each prints with a failure the `@reproduce_failure(...)` that plays it again.
settings.register_profile(
    "dev", max_examples=50, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("deep", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


# (file, its functions) in which, and below which, it is allowed, and why.
MAY_BLOCK = (
    # Once, before there is anybody to wait: config, keys, the files of a tokenizer.
    ("bus/config.py", {"load"}),
    ("bus/secretfile.py", {"read"}),
    ("bus/revision.py", {"of_directory"}),
    ("engine_sim/vocabulary.py", {"load"}),
    # A small local file, looked at for each connection and read when it has changed.
    ("auditor/callout.py", {"current"}),
    # Tests make and load their models wherever they are needed first.
    ("support/models.py", {"load", "smollm2", "tiny", "tiny_vocabulary", "with_template"}),
)


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    # `cluster` makes and starts deployments for people who wait for it; no service has it.
    with blockbuster_ctx("prefixbus", excluded_modules=["prefixbus.cluster"]) as watching:
        for function in watching.functions.values():
            for file, names in MAY_BLOCK:
                function.can_block_in(file, names)
        yield watching
