"""An MCP server for coding agents: plan, check, kernels, slices and flags.

`tools` are functions that return the same data as `--json`; `server` offers them through the
official SDK (extra `mcp`).
"""
