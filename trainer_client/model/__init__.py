"""The model as units, flat groups and shards: what is where, how it comes together, and how it is given back."""
