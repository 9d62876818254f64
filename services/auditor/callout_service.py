"""The callout's process: the issuer's seed and the tenants file on one side, the bus on the other.

It connects in the AUTH account, where nobody but the server can ask. Must not know: how a token is checked."""

import os

from ..bus import secretfile
from ..bus.runtime import Runtime
from . import callout
from .jwt import Issuer
from .metrics import CalloutMetrics


async def run(rt: Runtime) -> None:
    """Runs until `rt.stopping`. :raises ConfigInvalid: a seed is missing or damaged."""
    metrics = CalloutMetrics(rt.registry)
    creds = rt.state / "creds"
    answering = callout.Callout(
        issuer=Issuer(secretfile.read(creds / "issuer.nk")),
        xkey_seed=secretfile.read(creds / "xkey.nk").decode("ascii"),
        tenants=callout.TenantsOnDisk(creds / "tenants.json"),
        clock=rt.clock,
        entropy=os.urandom,
        on_result=lambda result: metrics.authorizations.labels(result).inc(),
    )
    subscription = await callout.serve(rt.bus, answering)
    rt.ready(answering.not_ready_because)
    await rt.stopping.wait()
    await subscription.drain()
