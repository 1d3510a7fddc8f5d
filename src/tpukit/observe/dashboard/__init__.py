"""The dashboard: one small web application over run directories, which needs no network."""
