"""The daemon as a process: its log, its descriptors, its NUMA node, and a watch over its event loop."""
