"""The monitor: reads all sources at even intervals, keeps the newest, alerts and exports."""
