"""What a strategy costs, before there is a device to run it on."""

from shardwright.plan.memory import bytes_by_path as bytes_by_path
