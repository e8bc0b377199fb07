"""The report page and the local page."""
