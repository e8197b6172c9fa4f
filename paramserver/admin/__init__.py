"""The operator's command `paramserver-admin`: one file per verb. All verbs print through printers.py."""
