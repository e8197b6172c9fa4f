"""The daemon's metrics, and the HTTP endpoint from which a monitoring system reads them."""
