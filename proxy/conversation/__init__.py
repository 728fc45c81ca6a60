"""Which conversation a request belongs to, and what is known of it while the process lives."""

from proxy.conversation.book import Conversations
from proxy.conversation.thread import UNKNOWN, Match, Prefix, Thread

__all__ = ["UNKNOWN", "Conversations", "Match", "Prefix", "Thread"]
