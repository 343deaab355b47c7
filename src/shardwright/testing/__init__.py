"""What a test of sharded code needs on a machine without accelerators."""

from shardwright.testing.meshes import cpu_mesh as cpu_mesh
from shardwright.testing.meshes import virtual_devices as virtual_devices
