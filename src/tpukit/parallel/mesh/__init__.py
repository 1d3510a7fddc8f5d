"""Meshes of devices and the roles of their axes."""
