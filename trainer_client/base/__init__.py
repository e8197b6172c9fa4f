"""Modules that all other packages of the client may use. They do no training and call no daemon."""
