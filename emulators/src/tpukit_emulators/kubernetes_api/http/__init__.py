"""The cluster's API over HTTPS, as kubectl and the Python client speak it."""
