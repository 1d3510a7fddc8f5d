"""Loopback servers that speak the providers' protocols, so that a launch can be rehearsed.

`clock` and `world` are a made-up cloud in no API's words; each folder beside them shows it through
one API to that API's unmodified client, and `hosts` are its machines.
"""
