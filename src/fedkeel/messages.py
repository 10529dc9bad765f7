"""What travels between server and clients: `fedkeel.core.messages` under its short name."""

from fedkeel.core.messages import *  # noqa: F403
