"""The page for people beside the metrics: what a daemon does now and did in the last minutes, in a browser."""
