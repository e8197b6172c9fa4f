"""The modules that call a store daemon: the transport of a trainer, and the StoreClient of other programs."""
