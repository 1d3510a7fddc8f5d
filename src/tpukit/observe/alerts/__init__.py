"""Alerts: rules on metrics, the state of each rule, explanations, and actions."""

from .actions import Action as Action
from .actions import run_command as run_command
from .actions import send_webhook as send_webhook
from .alert import Alert as Alert
from .rule import AlertRule as AlertRule
