"""The tiered storage engine: shards, versions, tiers, placement, prefetch and commit. No gRPC, no nn.Module."""
