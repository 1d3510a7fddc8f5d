"""What coding agents ask the compiler: an MCP server over plan, check, kernels, slices and flags.

`tools` are plain functions that return the same plain data as `--json`; `server` offers them
through the official SDK (extra `mcp`).
"""
