"""The page for people beside the metrics: it shows in a browser what a daemon does now and did in the last minutes."""
