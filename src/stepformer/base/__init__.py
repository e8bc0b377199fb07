"""What everything stands on: errors, files, settings, names, plug-ins. Nothing here knows a model."""
