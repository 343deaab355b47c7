"""What the kernels of attention share: shards, online softmax, dropout masks, Pallas under `shard_map`."""
