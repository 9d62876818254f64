"""What the directory's shell refuses before it touches the bus."""

from pathlib import Path

import pytest

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import Config, DirectorySection
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.bus.runtime import Runtime
from prefixbus.directory import service


@pytest.mark.parametrize("shard", [-1, 2])
async def test_a_shard_that_is_not_there_is_not_served(tmp_path: Path, shard: int) -> None:
    config = Config(directory=DirectorySection(shards=2))
    rt = Runtime("directory", "directory-1", tmp_path, config, VirtualClock())

    with pytest.raises(ConfigInvalid, match=f"there is no shard {shard}"):
        await service.run(rt, shard)
