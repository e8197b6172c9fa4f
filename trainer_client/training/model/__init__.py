"""The model as units, flat groups and shards: where parameters live, and how they are gathered and released."""
