"""The operator's command `paramserver-admin`: one file per verb; all of them print through printers.py."""
