"""Alerts: rules over metrics, the state each is in, an explanation, and what is done about it."""

from .actions import Action as Action
from .actions import run_command as run_command
from .actions import send_webhook as send_webhook
from .alert import Alert as Alert
from .rule import AlertRule as AlertRule
