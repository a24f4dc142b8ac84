"""The application put together: settings, and the one place that joins the parts."""
