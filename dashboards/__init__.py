"""The Dash app; imported as `diagnose.dashboards`."""
